// Holds the explorer's page in a frame without an origin, keeps what it shows behind the # of the window's address, where
// neither the server nor Streamlit looks, and tells it of the theme. The page itself comes by explorer_page.js.

const MOST = 100000; // pixels, and letters of a state: a frame that says more isn't ours
const HEAD = 84; // pixels: what Streamlit lays over the top of the page, and a margin

export default function ({ parentElement, data, setTriggerValue }) {
  const box = parentElement.querySelector("div"), key = `driftlens ${data.run}`;
  const read = () => { try { return JSON.parse(sessionStorage.getItem(key)) ?? {}; } catch { return {}; } };
  box.isKept = data.show === "";
  box.at ??= location.pathname; // on the way to another page this one still stands, and the address is no longer its own
  const keep = (state) => {
    if (!box.isKept) return;
    sessionStorage.setItem(key, JSON.stringify({ state, asked: data.asked }));
    box.state = state;
    const task = new URLSearchParams(state).get("task");
    if (task && task !== (box.task ?? data.task ?? task)) setTriggerValue("task", task); // other pages show it, too
    box.task = task;
    if (location.pathname === box.at && location.hash.slice(1) !== state) history.replaceState(history.state, "", `#${state}`);
  };
  const start = () => {
    const kept = read(), isNew = data.asked && data.asked !== kept.asked;
    const said = box.isKept && !isNew && (box.run ?? data.run) === data.run && location.hash.slice(1);
    if (said) return said;
    const state = new URLSearchParams(isNew || !box.isKept ? data.state : kept.state ?? data.state);
    if (data.task && !(isNew && state.has("task"))) state.set("task", data.task);
    return String(state);
  };
  box.news = { dark: data.dark, ...(box.isKept ? {} : { task: data.task }) };
  const inform = () => box.frame.contentWindow.postMessage(box.news, "*");
  const load = (state) => {
    box.frame?.remove();
    const frame = (box.frame = document.createElement("iframe"));
    frame.setAttribute("sandbox", "allow-scripts allow-downloads");
    frame.title = data.title;
    frame.name = `driftlens ${JSON.stringify({ state, dark: data.dark, show: data.show, high: innerHeight - HEAD })}`;
    frame.style.height = `${box.height ?? data.height}px`;
    frame.onload = inform; // it answers with its height, also where it is out of sight
    box.append(frame);
    fill();
    keep(state);
  };
  const fill = () => {
    const page = window.explorerPage;
    if (page?.name === data.page && box.frame && !box.frame.srcdoc) box.frame.srcdoc = page.text;
  };
  const hear = ({ source, data: said }) => {
    if (!box.frame || source !== box.frame.contentWindow) return;
    if (said?.height > 0 && said.height < MOST) box.frame.style.height = `${(box.height = said.height)}px`;
    if (typeof said?.state === "string" && said.state.length < MOST) keep(said.state);
  };
  const travel = () => { if (box.isKept && location.pathname === box.at && location.hash.slice(1) !== box.state) load(start()); };

  if (box.page !== data.page || box.asked !== data.asked) {
    Object.assign(box, { page: data.page, asked: data.asked });
    load(start());
    box.run = data.run;
  } else inform();
  box.leave?.();
  addEventListener("message", hear);
  addEventListener("explorer-page", fill);
  addEventListener("hashchange", travel);
  // Streamlit writes addresses of its own, without what is behind the #.
  const looking = setInterval(() => { if (box.isKept && !location.hash && box.state) keep(box.state); }, 300);
  const leave = (box.leave = () => { removeEventListener("message", hear); removeEventListener("explorer-page", fill); removeEventListener("hashchange", travel); clearInterval(looking); });
  return leave; // its own listeners only: Streamlit may call it after the next drawing
}
