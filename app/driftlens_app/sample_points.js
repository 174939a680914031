// Shows the picture of the sample whose point the pointer is over (plotly's own labels hold text alone), and marks the
// selected samples in every panel: plotly marks them only where they were selected, and a new figure would lose the zoom.

const SIZE = 82; // pixels, frame included
const GAP = 36; // to the pointer: plotly's label lies beside it

export default function ({ parentElement, data }) {
  const picture = parentElement.querySelector("img");
  const FAINT = "0.12";
  let marked = new Set(data.marked);
  let isMarking = false;
  const mark = () => {
    if (!marked.size && !isMarking) return;
    isMarking = marked.size > 0;
    for (const trace of document.querySelectorAll(`.st-key-${data.chart} .scatterlayer .trace`)) {
      const ids = trace.__data__?.[0]?.trace?.customdata;
      for (const point of ids ? trace.querySelectorAll(".point") : []) {
        const isMarked = marked.has(ids[point.__data__.i]);
        if (isMarking) {
          point.style.setProperty("opacity", isMarked ? "1" : FAINT, "important");
          point.dataset.marked = isMarked;
        } else {
          point.style.removeProperty("opacity");
          delete point.dataset.marked;
        }
      }
    }
  };
  const select = (event) => {
    const ids = (event?.points ?? []).map((point) => point.customdata).filter(Boolean);
    if (ids.length) marked = new Set(ids);
    mark();
  };
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
    if (!chart?.on) return;
    mark();
    if (chart.on === on) return;
    on = chart.on;
    on("plotly_hover", show);
    on("plotly_unhover", hide);
    on("plotly_selected", select);
    on("plotly_afterplot", mark);
  };
  clearInterval(parentElement.listening);
  isMarking = !!document.querySelector(`.st-key-${data.chart} [data-marked]`);
  hide();
  listen();
  parentElement.listening = setInterval(listen, 500);
  return () => clearInterval(parentElement.listening);
}
