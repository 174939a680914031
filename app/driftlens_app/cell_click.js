// Tells the server which cell of a heatmap was clicked: Streamlit passes on selections of points alone.

export default function ({ parentElement, data, setTriggerValue }) {
  let on = null;
  const click = ({ points }) => {
    const cell = points.find((point) => point.data.type === "heatmap");
    if (cell) setTriggerValue("cell", [cell.y, cell.x]);
  };
  // Streamlit draws charts anew when it likes; each drawing brings a listener function of its own.
  const listen = () => {
    const chart = document.querySelector(`.st-key-${data.chart} .js-plotly-plot`);
    if (!chart?.on || chart.on === on) return;
    on = chart.on;
    on("plotly_click", click);
  };
  clearInterval(parentElement.listening);
  listen();
  parentElement.listening = setInterval(listen, 500);
  return () => clearInterval(parentElement.listening);
}
