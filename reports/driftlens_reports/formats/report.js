"use strict";
// Charts are drawn one after the other, so that the page can be read meanwhile: those of sections that are open, the
// others when theirs is opened. Printing opens and finishes what is left.
(() => {
  // Pixels of a drawing before the style sheet's zoom for paper; much lower than a page, so that pages get full.
  const PRINTED_WIDTH = 1030, PRINTED_HEIGHT = 700;
  // A page, for charts of so many panels that they would be too low; they have no room for titles of value axes.
  const PAGE_HEIGHT = 1340;
  const waiting = new Set(document.querySelectorAll(".plot"));
  const drawn = [];

  // A figure's `dark` holds what differs in dark colours, nested as the figure is; paper is light.
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const paint = (figure, other) => {
    for (const [key, value] of Object.entries(other)) {
      const isNested = value !== null && typeof value === "object" && !Array.isArray(value);
      if (isNested && typeof figure[key] === "object" && figure[key] !== null) paint(figure[key], value);
      else figure[key] = value;
    }
  };
  const show = (plot, isDark) => {
    const { dark, data, layout } = JSON.parse(document.getElementById(plot.dataset.figure).textContent);
    const figure = { data, layout };
    if (isDark && dark) paint(figure, dark);
    return Plotly.react(plot, data, layout, { responsive: true, displaylogo: false });
  };
  const draw = (plot, isDark = scheme.matches) => {
    waiting.delete(plot);
    drawn.push(plot);
    return show(plot, isDark);
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
    for (const plot of drawn) if (scheme.matches) show(plot, false);
    for (const plot of waiting) draw(plot, false);
    for (const plot of drawn) {
      const { height } = plot._fullLayout; // a resized window leaves none in `layout`
      const isCrowded = height > 2.5 * PRINTED_HEIGHT, highest = isCrowded ? PAGE_HEIGHT : PRINTED_HEIGHT;
      plot.classList.toggle("crowded", isCrowded);
      Plotly.relayout(plot, { autosize: false, width: PRINTED_WIDTH, height: Math.min(height, highest) });
    }
  });
  window.addEventListener("afterprint", () => {
    for (const plot of drawn) show(plot, scheme.matches); // with its own size again
  });
  scheme.addEventListener("change", () => {
    for (const plot of drawn) show(plot, scheme.matches);
  });
  openTarget();
  drawSoon();
})();
