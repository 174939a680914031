// Shows the picture of the sample whose point the pointer is over; plotly's own labels hold text alone.

const SIZE = 82; // pixels, frame included
const GAP = 36; // to the pointer: plotly's label lies beside it

export default function ({ parentElement, data }) {
  const picture = parentElement.querySelector("img");
  const hide = () => { picture.hidden = true; };
  const show = ({ points, event }) => {
    const sample = points[0]?.customdata;
    const address = data.pictures[sample];
    if (!address) return hide();
    picture.src = address;
    picture.alt = `sample ${sample}`;
    const above = event.clientY - GAP - SIZE;
    picture.style.left = `${event.clientX - SIZE / 2}px`;
    picture.style.top = `${above > 0 ? above : event.clientY + GAP}px`;
    picture.hidden = false;
  };

  // Streamlit draws charts anew when it likes; each drawing brings a listener function of its own.
  let on = null;
  const listen = () => {
    const chart = document.querySelector(`.st-key-${data.chart} .js-plotly-plot`);
    if (!chart?.on || chart.on === on) return;
    on = chart.on;
    on("plotly_hover", show);
    on("plotly_unhover", hide);
  };
  clearInterval(parentElement.listening);
  hide();
  listen();
  parentElement.listening = setInterval(listen, 500);
  return () => clearInterval(parentElement.listening);
}
