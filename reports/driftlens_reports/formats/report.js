"use strict";
// Charts are drawn one after the other, so that the page can be read meanwhile: those of sections that are open, the
// others when theirs is opened. Printing opens and finishes what is left.
(() => {
  const PRINTED_WIDTH = 680;
  const waiting = new Set(document.querySelectorAll(".plot"));
  const drawn = [];

  const draw = (plot) => {
    const { data, layout } = JSON.parse(document.getElementById(plot.dataset.figure).textContent);
    waiting.delete(plot);
    Plotly.newPlot(plot, data, layout, { responsive: true, displaylogo: false });
    drawn.push(plot);
  };
  const drawSoon = () => {
    const next = [...waiting].find((plot) => plot.closest("details:not([open])") === null);
    if (next === undefined) {
      document.body.dataset.drawn = "all";
      return;
    }
    draw(next);
    setTimeout(drawSoon, 0);
  };
  const openTarget = () => {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (target) target.closest("details")?.setAttribute("open", "");
    if (target) target.scrollIntoView();
  };

  document.addEventListener("toggle", drawSoon, true);
  window.addEventListener("hashchange", openTarget);
  window.addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details.part")) part.open = true;
    for (const plot of waiting) draw(plot);
    for (const plot of drawn) Plotly.relayout(plot, { autosize: false, width: PRINTED_WIDTH });
  });
  window.addEventListener("afterprint", () => {
    for (const plot of drawn) Plotly.relayout(plot, { autosize: true, width: null });
  });
  openTarget();
  drawSoon();
})();
