// Charts are coloured and laid out by the server, which hears of another theme or width only when something makes it
// run again: this does.

// For a reader going to another page is one step. Streamlit first takes what was chosen, run and all, from the address of
// the page that is left, and from that of the next one; the server fills either again, however long it takes.
// Nor is it a step that a part of a page which is no longer open takes what only it asks for from the address.
if (!window.stepsOfHistory) {
  const push = (window.stepsOfHistory = history.pushState);
  const chosen = ({ search }) =>
    ["run", "task", "variants", "layer", "measure"].map((name) => new URLSearchParams(search).getAll(name)).join(";");
  let isLeaving = false;
  history.pushState = (state, title, url) => {
    const to = new URL(url, location), isSame = to.pathname === location.pathname;
    const isFilled = new URLSearchParams(location.search).has("run"), isEmptied = isSame && !to.searchParams.has("run");
    const isStep = !isLeaving && (!isSame || (isFilled && (isEmptied || chosen(to) !== chosen(location))));
    isLeaving = isSame && (isLeaving || (isStep && isEmptied));
    (isStep ? push : history.replaceState).call(history, state, title, url);
  };
}

export default function ({ parentElement, data, setStateValue, setTriggerValue }) {
  const surface = () => getComputedStyle(parentElement.host).getPropertyValue("--st-background-color");
  const isDark = () => {
    const channels = surface().match(/[0-9a-f]{2}/gi).slice(0, 3).map((pair) => parseInt(pair, 16));
    return channels.reduce((sum, channel) => sum + channel) < 3 * 128;
  };
  let said = data.dark;
  let narrow = data.narrow;
  const room = matchMedia("(max-width: 899px)");
  const look = () => {
    // Streamlit gives its field for files a name and says that it is mere decoration, which contradict each other.
    document.querySelectorAll("[data-testid=stFileUploaderDropzone][role]").forEach((it) => it.removeAttribute("role"));
    if (room.matches !== narrow) {
      narrow = !narrow;
      setStateValue("narrow", narrow);
    }
    if (isDark() === said) return;
    said = !said;
    setTriggerValue("dark", said);
  };
  clearInterval(parentElement.looking);
  look();
  parentElement.looking = setInterval(look, 300);
  return () => clearInterval(parentElement.looking);
}
