"use strict";
// Charts are drawn one after the other, so that the page can be read meanwhile; printing finishes what is left.
(() => {
  const PRINTED_WIDTH = 680;
  const waiting = [...document.querySelectorAll(".plot")];
  const drawn = [];

  const drawNext = () => {
    const plot = waiting.shift();
    const { data, layout } = JSON.parse(document.getElementById(plot.dataset.figure).textContent);
    Plotly.newPlot(plot, data, layout, { responsive: true, displaylogo: false });
    drawn.push(plot);
  };
  const drawSoon = () => {
    if (waiting.length === 0) {
      document.body.dataset.drawn = "all";
      return;
    }
    drawNext();
    setTimeout(drawSoon, 0);
  };

  window.addEventListener("beforeprint", () => {
    while (waiting.length > 0) drawNext();
    for (const plot of drawn) Plotly.relayout(plot, { autosize: false, width: PRINTED_WIDTH });
  });
  window.addEventListener("afterprint", () => {
    for (const plot of drawn) Plotly.relayout(plot, { autosize: true, width: null });
  });
  drawSoon();
})();
