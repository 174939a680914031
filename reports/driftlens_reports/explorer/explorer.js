// The explorer: samples move from model to model and from layer to layer, are chosen, counted and handed out. All that is
// shown lies in the page; names and texts come from anybody and become text, never HTML. Points are stamped into pixels.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const N = data.ids.length, S = data.stages.length, L = data.layers.length, K = data.neighbours;
  const PER_PAGE = 24, PER_GROUP = 8, BINS = 24, MOST_NAMED = 12, FAINT = 0.16, LEG = 1100, REST = 500, TWEEN = 350;
  const GLYPHS = "●■◆▲✚✖▼★";
  const GOOD = ["right", "repaired"];
  const CHANGED = ["wrong", "repaired", "still wrong", "broken"]; // by the merge, and by the repair: what stands side by side
  // Outcomes that show the same of a sample share a colour; the others have the one of their name.
  const COLOUR_OF = { "still wrong": "wrong" }, OUTCOME_SHAPES = { right: 0, repaired: 3, "still wrong": 5, wrong: 5, broken: 6, "never gained": 4, "expert wrong": 2 };
  const calm = matchMedia("(prefers-reduced-motion: reduce)"), scheme = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;

  // ---- a host, if there is one: it names the frame by what is to be shown, since a frame without an origin has no address
  const HOSTED = "driftlens ";
  const hosted = parent !== window && window.name.startsWith(HOSTED) ? JSON.parse(window.name.slice(HOSTED.length)) : null;
  const tell = (message) => { if (hosted) parent.postMessage(message, "*"); };
  const isDark = () => (root.dataset.theme ?? (scheme.matches ? "dark" : "light")) === "dark";
  const setTheme = (dark) => { root.dataset.theme = dark ? "dark" : "light"; };
  if (hosted) { root.dataset.show = hosted.show; setTheme(hosted.dark); }

  // ---- what was packed -------------------------------------------------------------------------------------------
  const unpacked = (text, Kind) => {
    const raw = atob(text), bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    return new Kind(bytes.buffer);
  };
  const packed = data.columns;
  const column = {
    label: unpacked(packed.label, Int32Array), answers: unpacked(packed.answers, Int32Array),
    right: unpacked(packed.right, Int8Array), confidence: unpacked(packed.confidence, Float32Array),
    margin: unpacked(packed.margin, Float32Array), drift: unpacked(packed.drift, Float32Array),
    mismatch: unpacked(packed.mismatch, Float32Array), propagation: unpacked(packed.propagation, Float32Array),
    share: unpacked(packed.share, Float32Array),
  };
  const repairs = Object.keys(packed.outcome);
  const outcomes = repairs.map((name) => unpacked(packed.outcome[name], Int8Array));
  const pictures = { ...data.pictures, places: unpacked(data.pictures.places, Int32Array) };
  const taskOf = new Int32Array(N);
  data.tasks.forEach((task, at) => taskOf.fill(at, task.start, task.start + task.n));
  const EXPERT = data.stages.findIndex((stage) => stage.part === "expert");
  const planes = new Map();
  const planeOf = (task, layer) => {
    const key = task * L + layer, stored = data.planes[task][layer];
    if (stored && !planes.has(key)) {
      const xy = unpacked(stored.places, Int16Array), ends = [Infinity, -Infinity, Infinity, -Infinity];
      for (let i = 0; i < xy.length; i++) if (xy[i] !== -32768) { const at = 2 * (i % 2); ends[at] = Math.min(ends[at], xy[i]); ends[at + 1] = Math.max(ends[at + 1], xy[i]); }
      const [x0, x1, y0, y1] = ends; // what holds all samples wherever they go, so that nothing jumps between models
      planes.set(key, { ...stored, xy, near: unpacked(stored.neighbours, Int16Array), middle: [(x0 + x1) / 2, (y0 + y1) / 2], size: [(x1 - x0) / 2 || 1, (y1 - y0) / 2 || 1] });
    }
    return planes.get(key);
  };
  const haystack = data.ids.map((id, i) => [id, data.texts[i], data.words[column.label[i]] ?? "", data.tasks[taskOf[i]].name].join("\n").toLowerCase());

  // ---- what the reader has chosen --------------------------------------------------------------------------------
  const firstLayer = () => Math.max(0, data.layers.findLastIndex((_, l) => data.planes.some((of) => of[l])));
  const hasOutcome = outcomes.some((of) => of.some((at) => at >= 0));
  const broken = data.tasks.map((task) => outcomes[0].slice(task.start, task.start + task.n).filter((at) => ["still wrong", "wrong", "repaired"].includes(data.outcomes[at]?.[0])).length);
  const state = {
    task: broken.indexOf(Math.max(...broken)), panels: "one", colour: hasOutcome ? "outcome" : "class", repair: 0, layer: firstLayer(),
    stage: Math.max(0, data.stages.findIndex((stage) => stage.part === "merged")),
    search: "", only: {}, ranges: {}, sort: "drift", as: "cards", page: 0, drag: "lasso", contours: N > 3000, names: true, picked: -1, name: "", open: { class: true, drift: true }, isExplained: false, isCompared: true,
  };
  const chosen = new Uint8Array(N), passes = new Uint8Array(N).fill(1);
  let numChosen = 0, saved = [];
  const view = { k: 1, x: 0, y: 0 };

  let stageDrawn = null; // of the panel that is drawn, where every panel shows its own model
  const stageAt = () => stageDrawn ?? Math.round(state.stage);
  const changed = () => (stageAt() === EXPERT ? (state.repair in repairs && repairs[0] ? data.stages.findIndex((s) => s.name === repairs[state.repair]) : Math.max(0, EXPERT - 1)) : stageAt());
  const at3 = (values, stage, layer, i) => values[(stage * L + layer) * N + i];
  const isShownTask = (task) => state.panels === "tasks" || task === state.task;

  // Columns by which samples are coloured, filtered and sorted: names of places in a list, or numbers.
  const named = (title, of, names) => ({ title, of, names });
  const number = (title, of) => ({ title, of });
  const outcomeNames = data.outcomes.map(([name]) => name);
  const COLUMNS = {
    outcome: named("outcome", (i) => outcomes[state.repair][i], outcomeNames),
    right: named("right or wrong", (i) => (column.right[stageAt() * N + i] < 0 ? -1 : 1 - column.right[stageAt() * N + i]), ["right", "wrong"]),
    flip: named("decision", (i) => {
      const own = column.answers[stageAt() * N + i], expert = column.answers[EXPERT * N + i];
      return own < 0 || expert < 0 ? -1 : own === expert ? 0 : 1;
    }, ["as the expert", "flipped"]),
    class: named("class", (i) => column.label[i], data.words),
    answer: named("answer", (i) => column.answers[stageAt() * N + i], data.words),
    task: named("task", (i) => taskOf[i], data.tasks.map((task) => task.name)),
    source: named("main source", (i) => sourceOf(i), data.layers),
    drift: number("drift", (i) => (stageAt() === EXPERT ? 0 : at3(column.drift, stageAt(), state.layer, i))),
    mismatch: number("mismatch", (i) => at3(column.mismatch, changed(), state.layer, i)),
    propagation: number("propagation", (i) => at3(column.propagation, changed(), state.layer, i)),
    share: number("share of final drift", (i) => at3(column.share, changed(), state.layer, i)),
    length: number("letters", (i) => (data.texts[i] ? data.texts[i].length : NaN)),
    margin: number("expert's margin", (i) => column.margin[i]),
    confidence: number("confidence", (i) => column.confidence[stageAt() * N + i]),
  };
  // Columns that depend on the model shown; on the layer; and those by which a selection is usually made.
  const STAGED = ["right", "flip", "answer", "drift", "confidence"], LAYERED = ["drift", "mismatch", "propagation", "share"], DEFINING = ["outcome", "right", "flip"];
  const sourceOf = (i) => {
    let best = -1, most = 0;
    for (let l = 0; l < L; l++) {
      const share = at3(column.share, changed(), l, i);
      if (share > most) [best, most] = [l, share];
    }
    return best;
  };
  const hasAny = (key) => {
    const { of, names } = COLUMNS[key];
    for (let i = 0; i < N; i++) if (names ? of(i) >= 0 : Number.isFinite(of(i))) return true;
    return false;
  };

  // ---- colours ---------------------------------------------------------------------------------------------------
  let ink = {};
  const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const mixed = (a, b, t) => a.map((c, at) => Math.round(c + (b[at] - c) * t));
  const pixel = ([r, g, b]) => (0xff000000 | (b << 16) | (g << 8) | r) >>> 0;
  const css = (c) => `rgb(${c.join(",")})`;
  const readTheme = () => {
    const style = getComputedStyle(document.documentElement), get = (name) => style.getPropertyValue(`--${name}`).trim();
    ink = { surface: channels(get("surface")), ink: channels(get("ink")), quiet: channels(get("quiet")), gap: channels(get("gap")) };
    ink.scale = get("scale").split(",").map(channels).slice(1);
    ink.classes = get("classes").split(",").map(channels);
    ink.outcomes = Object.fromEntries([...outcomeNames, "right", "wrong"].map((name) => [name, channels(get(`outcome-${(COLOUR_OF[name] ?? name).replaceAll(" ", "-")}`))]));
  };
  const lookOf = (key, at) => {
    if (at < 0) return [ink.gap, 0];
    if (key === "outcome") return [ink.outcomes[outcomeNames[at]], OUTCOME_SHAPES[outcomeNames[at]]];
    if (key === "right" || key === "flip") return [ink.outcomes[at ? "wrong" : "right"], at ? 5 : 0];
    return [ink.classes[at % ink.classes.length], at % GLYPHS.length];
  };
  const onScale = (share) => {
    const place = Math.min(Math.max(share, 0), 1) * (ink.scale.length - 1), low = Math.min(Math.floor(place), ink.scale.length - 2);
    return mixed(ink.scale[low], ink.scale[low + 1], place - low);
  };
  const tints = new Uint32Array(N), faints = new Uint32Array(N), shapes = new Uint8Array(N);
  let extent = [0, 1];
  const recolour = () => {
    const key = state.colour, { of, names } = COLUMNS[key], looks = new Map();
    const put = (i, colour, shape) => {
      const id = colour.join();
      if (!looks.has(id)) looks.set(id, [pixel(colour), pixel(mixed(ink.surface, colour, FAINT))]);
      [tints[i], faints[i]] = looks.get(id);
      shapes[i] = shape;
    };
    if (names) for (let i = 0; i < N; i++) put(i, ...lookOf(key, of(i)));
    else {
      extent = [Infinity, -Infinity];
      const [drawn, stages] = [stageDrawn, stageDrawn === null ? [null] : data.stages.map((_, at) => at)]; // one scale for all panels
      for (const stage of stages) { stageDrawn = stage; for (let i = 0; i < N; i++) if (isShownTask(taskOf[i]) && Number.isFinite(of(i))) extent = [Math.min(extent[0], of(i)), Math.max(extent[1], of(i))]; }
      stageDrawn = drawn;
      const shades = Array.from({ length: 65 }, (_, at) => onScale(at / 64)), span = extent[1] - extent[0] || 1;
      for (let i = 0; i < N; i++) put(i, Number.isFinite(of(i)) ? shades[Math.round(64 * Math.min(1, Math.max(0, (of(i) - extent[0]) / span)))] : ink.gap, 0);
    }
    colouredStage = stageAt();
  };
  let colouredStage = -1;

  // ---- panels: where points are, and their pixels ----------------------------------------------------------------
  let panels = [];
  const stampsOf = (radius, width) => [...GLYPHS].map((_, shape) => {
    const stamp = { offsets: [], weights: [] }, r = Math.ceil(radius + 1);
    const inside = [
      (x, y) => Math.hypot(x, y) <= radius, (x, y) => Math.max(Math.abs(x), Math.abs(y)) <= radius * 0.85,
      (x, y) => Math.abs(x) + Math.abs(y) <= radius * 1.25, (x, y) => y <= radius * 0.8 && Math.abs(x) * 1.7 <= y + radius * 1.1,
      (x, y) => Math.min(Math.abs(x), Math.abs(y)) <= radius * 0.38 && Math.max(Math.abs(x), Math.abs(y)) <= radius * 1.1,
      (x, y) => Math.min(Math.abs(x + y), Math.abs(x - y)) <= radius * 0.6 && Math.max(Math.abs(x), Math.abs(y)) <= radius,
      (x, y) => -y <= radius * 0.8 && Math.abs(x) * 1.7 <= -y + radius * 1.1, (x, y) => Math.hypot(x, y) <= radius * (0.75 + 0.4 * Math.cos(5 * Math.atan2(x, -y))),
    ][shape];
    for (let y = -r; y <= r; y++) {
      for (let x = -r; x <= r; x++) {
        let hits = 0;
        for (let s = 0; s < 16; s++) hits += inside(x + (s % 4) / 4 - 0.375, y + (s >> 2) / 4 - 0.375) ? 1 : 0;
        if (hits) { stamp.offsets.push(y * width + x); stamp.weights.push(hits / 16); }
      }
    }
    return stamp;
  });

  class Panel {
    constructor(task, layer, stage = null) {
      this.task = task; this.layer = layer; this.stage = stage;
      this.start = data.tasks[task].start; this.n = data.tasks[task].n;
      this.box = made("figure", "panel"); this.caption = made("figcaption", "", ""); this.canvas = made("canvas", "");
      this.canvas.tabIndex = 0;
      this.canvas.setAttribute("role", "application");
      this.box.append(this.caption, this.canvas);
      this.xy = new Float32Array(2 * this.n); this.shown = new Float32Array(2 * this.n); this.since = -Infinity;
      listen(this);
    }
    moveTo(task, layer) { // other samples appear at once, the same ones travel
      if (task === this.task && this.plane && !calm.matches) { this.from = this.shown.slice(); this.since = performance.now(); }
      this.task = task; this.layer = layer;
      this.place();
    }
    get plane() { return planeOf(this.task, this.layer); }
    place() {
      const plane = this.plane, n = this.n;
      if (!plane || !this.box.isConnected) return;
      const stageIn = (s) => { let at = plane.stages.findIndex((stage) => stage >= s); return at < 0 ? plane.stages.length - 1 : at; };
      const stage = this.stage ?? state.stage, low = Math.floor(stage), a = 2 * n * stageIn(low), b = 2 * n * stageIn(Math.ceil(stage)), f = stage - low, raw = plane.xy;
      if (!this.W) return void this.resize();
      const by = 1 / Math.max(plane.size[0] / this.wide, plane.size[1]); // every layer fills the panel, its shape kept
      for (let i = 0; i < 2 * n; i++) this.xy[i] = raw[a + i] === -32768 || raw[b + i] === -32768 ? NaN : (raw[a + i] + (raw[b + i] - raw[a + i]) * f - plane.middle[i % 2]) * by;
      this.labels = null;
    }
    resize() {
      const dpr = Math.min(devicePixelRatio || 1, 2), box = this.canvas.getBoundingClientRect();
      const W = Math.max(50, Math.round(box.width * dpr)), H = Math.max(50, Math.round(box.height * dpr));
      if (this.W === W && this.H === H) return;
      Object.assign(this, { W, H, dpr });
      this.canvas.width = W; this.canvas.height = H;
      this.pen = this.canvas.getContext("2d");
      this.image = this.pen.createImageData(W, H);
      this.pixels = new Uint32Array(this.image.data.buffer);
      const radius = (this.n > 5000 ? 1.6 : this.n > 1200 ? 2.4 : this.n > 300 ? 3.4 : 4.6) * dpr * (panels.length > 2 ? 0.8 : 1);
      this.radius = radius; this.margin = Math.ceil(radius * 1.4 + 2);
      this.stamps = stampsOf(radius, W);
      this.wide = (W / 2 - this.margin - 4) / (H / 2 - this.margin - 4);
      this.place();
    }
    screen(i) { return [this.ox + this.shown[2 * i] * this.zoom, this.oy - this.shown[2 * i + 1] * this.zoom]; }
    aim() { // where zero is, and pixels a unit; for `screen`, which is asked for every point of every frame
      const zoom = (this.H / 2 - this.margin - 4) * view.k;
      Object.assign(this, { zoom, ox: this.W / 2 - view.x * zoom, oy: this.H / 2 + view.y * zoom });
    }
    draw(now) {
      this.resize();
      this.aim();
      const { W, H, pixels, n } = this, ease = Math.min(1, (now - this.since) / TWEEN), t = ease * ease * (3 - 2 * ease);
      if (this.from && t < 1) for (let i = 0; i < 2 * n; i++) this.shown[i] = this.from[i] + (this.xy[i] - this.from[i]) * t;
      else this.shown.set(this.xy);
      pixels.fill(pixel(ink.surface));
      if (!this.plane) { this.pen.putImageData(this.image, 0, 0); this.say("No stored features for this layer."); return false; }
      const isStrong = (g) => passes[g] && (!numChosen || chosen[g]);
      const { shown, start, zoom, ox, oy, margin, stamps } = this;
      const step = t < 1 || playing || isDragged ? stride : 1;
      for (let strong = 0; strong < 2; strong++) { // faint ones first
        const colours = strong ? tints : faints;
        for (let i = 0; i < n; i += step) {
          const g = start + i;
          if ((passes[g] && (!numChosen || chosen[g]) ? 1 : 0) !== strong) continue;
          const x = ox + shown[2 * i] * zoom, y = oy - shown[2 * i + 1] * zoom;
          if (x > margin && y > margin && x < W - margin && y < H - margin) this.stamp((y | 0) * W + (x | 0), colours[g], stamps[shapes[g]]);
        }
      }
      this.pen.putImageData(this.image, 0, 0);
      if (state.contours && step === 1) this.contours(isStrong);
      this.overlay();
      if (state.names && (this.labels || !(t < 1 || playing))) this.write();
      return t < 1;
    }
    stamp(at, colour, { offsets, weights }) {
      const { pixels } = this, r = colour & 255, g = (colour >> 8) & 255, b = (colour >> 16) & 255;
      for (let k = 0; k < offsets.length; k++) {
        const w = weights[k], p = at + offsets[k];
        if (w === 1) { pixels[p] = colour; continue; }
        const old = pixels[p], or = old & 255, og = (old >> 8) & 255, ob = (old >> 16) & 255;
        pixels[p] = (0xff000000 | ((ob + (b - ob) * w) << 16) | ((og + (g - og) * w) << 8) | (or + (r - or) * w)) >>> 0;
      }
    }
    write() { // names of clusters, the largest first, where they hide no other name
      this.labels ??= clustersOf(this);
      const pen = this.pen, taken = [];
      pen.font = `600 ${12 * this.dpr}px system-ui, sans-serif`; pen.textAlign = "center"; pen.textBaseline = "middle";
      pen.lineWidth = 3.5 * this.dpr; pen.lineJoin = "round"; pen.strokeStyle = css(ink.surface); pen.fillStyle = css(ink.ink);
      for (const label of this.labels) {
        const x = this.ox + label.x * this.zoom, y = this.oy - label.y * this.zoom, half = pen.measureText(label.text).width / 2 + 3, high = 9 * this.dpr;
        label.isShown = x > half && y > high && x < this.W - half && y < this.H - high && !taken.some(([a, b, w]) => Math.abs(a - x) < w + half && Math.abs(b - y) < 2 * high);
        if (!label.isShown) continue;
        taken.push([x, y, half]);
        pen.strokeText(label.text, x, y); pen.fillText(label.text, x, y);
      }
      pen.textBaseline = "alphabetic";
    }
    say(text) {
      this.pen.fillStyle = css(ink.quiet); this.pen.font = `${14 * this.dpr}px system-ui, sans-serif`;
      this.pen.textAlign = "center"; this.pen.fillText(text, this.W / 2, this.H / 2, this.W - 20);
    }
    overlay() {
      const pen = this.pen, i = state.picked - this.start, plane = this.plane;
      pen.lineWidth = 1.5 * this.dpr; pen.strokeStyle = css(ink.ink);
      if (i >= 0 && i < this.n) {
        const [x, y] = this.screen(i), own = plane.stages.indexOf(this.stage ?? stageAt());
        pen.globalAlpha = 0.6;
        for (let k = 0; own >= 0 && k < K; k++) {
          const j = plane.near[(own * this.n + i) * K + k];
          if (j >= 0) { pen.beginPath(); pen.moveTo(x, y); pen.lineTo(...this.screen(j)); pen.stroke(); }
        }
        pen.globalAlpha = 1;
        pen.beginPath(); pen.arc(x, y, this.radius + 4 * this.dpr, 0, 7); pen.stroke();
      }
      if (this.rod) {
        const [x, y] = this.rod.at;
        pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, this.H); pen.moveTo(0, y); pen.lineTo(this.W, y);
        pen.globalAlpha = 0.5; pen.stroke(); pen.globalAlpha = 1;
      }
      if (this.path) {
        pen.setLineDash([4, 3]);
        pen.beginPath(); this.path.forEach((p, at) => (at ? pen.lineTo(...p) : pen.moveTo(...p))); pen.closePath(); pen.stroke();
        pen.setLineDash([]);
      }
    }
    contours(isStrong) { // a smoothed histogram on a grid, cut at four heights
      const G = 48, grid = new Float32Array(G * G), sx = (G - 1) / this.W, sy = (G - 1) / this.H, pen = this.pen;
      for (let i = 0; i < this.n; i++) {
        if (!isStrong(this.start + i)) continue;
        const [x, y] = this.screen(i), c = Math.round(x * sx), r = Math.round(y * sy);
        if (c >= 0 && r >= 0 && c < G && r < G) grid[r * G + c]++;
      }
      for (let pass = 0; pass < 4; pass++) {
        const step = pass % 2 ? G : 1, old = grid.slice();
        for (let at = step; at < G * G - step; at++) grid[at] = (old[at - step] + 2 * old[at] + old[at + step]) / 4;
      }
      const top = grid.reduce((a, b) => Math.max(a, b), 0);
      for (const [level, alpha] of [[0.08, 0.5], [0.25, 0.65], [0.5, 0.8], [0.75, 1]]) {
        pen.beginPath();
        for (let r = 0; r < G - 1; r++) for (let c = 0; c < G - 1; c++) edges(grid, G, r, c, level * top, (x, y, first) => (first ? pen.moveTo(x / sx, y / sy) : pen.lineTo(x / sx, y / sy)));
        for (const [colour, width, opacity] of [[ink.surface, 3.5, 0.6 * alpha], [ink.ink, 1.3, alpha]]) { // seen on points and beside them
          pen.strokeStyle = css(colour); pen.lineWidth = width * this.dpr; pen.globalAlpha = opacity;
          pen.stroke();
        }
      }
      pen.globalAlpha = 1;
    }
    nearest(x, y, reach) {
      let best = -1, least = reach * reach;
      for (let i = 0; i < this.n; i++) {
        if (!passes[this.start + i]) continue;
        const [px, py] = this.screen(i), d = (px - x) ** 2 + (py - y) ** 2;
        if (d < least) [best, least] = [i, d];
      }
      return best < 0 ? -1 : this.start + best;
    }
  }

  const edges = (grid, G, r, c, level, to) => { // where a height crosses one cell's borders, one line after the other
    const v = [grid[r * G + c], grid[r * G + c + 1], grid[(r + 1) * G + c + 1], grid[(r + 1) * G + c]];
    const corner = [[c, r], [c + 1, r], [c + 1, r + 1], [c, r + 1]], cuts = [];
    for (let e = 0; e < 4; e++) {
      const a = v[e], b = v[(e + 1) % 4];
      if ((a < level) !== (b < level)) {
        const t = (level - a) / (b - a), [p, q] = [corner[e], corner[(e + 1) % 4]];
        cuts.push([p[0] + (q[0] - p[0]) * t, p[1] + (q[1] - p[1]) * t]);
      }
    }
    for (let k = 0; k + 1 < cuts.length; k += 2) { to(...cuts[k], true); to(...cuts[k + 1], false); }
  };

  // ---- names of clusters ---------------------------------------------------------------------------------------
  const MOST_LABELS = 24, FEWEST = 4, SMALL_WORDS = 3;
  const vocabularies = [];
  const wordsOf = (i) => (vocabularies[i] ??= [...new Set((data.texts[i] ?? "").toLowerCase().match(/[\p{L}\p{N}'-]+/gu) ?? [])].filter((text) => text.length > SMALL_WORDS));
  const clustersOf = (panel) => { // places in units of the panel: of each class, else of clusters of texts
    const members = new Map(), { n, start, xy } = panel, add = (name, i) => { if (!members.has(name)) members.set(name, []); members.get(name).push(i); };
    const shown = Array.from({ length: n }, (_, i) => i).filter((i) => passes[start + i] && Number.isFinite(xy[2 * i]));
    const isNamed = shown.some((i) => column.label[start + i] >= 0);
    if (isNamed) { for (const i of shown) if (column.label[start + i] >= 0) add(word(column.label[start + i]), i); } else if (shown.some((i) => data.texts[start + i])) clustered(panel, shown).forEach((cluster) => add(mostFrequent(cluster, start, shown), cluster));
    const middle = (list, of) => { const values = Float64Array.from(list, of).sort(); return values[values.length >> 1]; };
    return [...members].map(([text, list]) => [text.length > 28 ? `${text.slice(0, 27)}…` : text, list.flat()]).filter(([text, list]) => text && list.length >= Math.min(FEWEST, shown.length))
      .sort((a, b) => b[1].length - a[1].length).slice(0, MOST_LABELS).map(([text, list]) => ({ text, n: list.length, x: middle(list, (i) => xy[2 * i]), y: middle(list, (i) => xy[2 * i + 1]) }));
  };
  const clustered = ({ xy }, shown) => { // Lloyd's algorithm from points that lie far from one another
    const k = Math.max(1, Math.min(10, Math.round(Math.sqrt(shown.length / 8)))), centres = [], distance = (i, [x, y]) => (xy[2 * i] - x) ** 2 + (xy[2 * i + 1] - y) ** 2;
    const away = new Float64Array(shown.length).fill(Infinity);
    for (let next = shown[0]; centres.length < k;) {
      centres.push([xy[2 * next], xy[2 * next + 1]]);
      shown.forEach((i, at) => { away[at] = Math.min(away[at], distance(i, centres.at(-1))); });
      next = shown[away.indexOf(away.reduce((a, b) => Math.max(a, b), 0))];
    }
    let parts = [];
    for (let round = 0; round < 8; round++) {
      parts = centres.map(() => []);
      for (const i of shown) parts[centres.reduce((best, centre, at) => (distance(i, centre) < distance(i, centres[best]) ? at : best), 0)].push(i);
      parts.forEach((part, at) => { if (part.length) centres[at] = [mean(part.map((i) => xy[2 * i])), mean(part.map((i) => xy[2 * i + 1]))]; });
    }
    return parts.filter((part) => part.length);
  };
  const mostFrequent = (cluster, start, shown) => { // the words whose share is highest against all samples
    const shares = (list) => { const found = new Map(); for (const i of list) for (const text of wordsOf(start + i)) found.set(text, (found.get(text) ?? 0) + 1 / list.length); return found; };
    const all = shares(shown);
    return [...shares(cluster)].sort((a, b) => b[1] - all.get(b[0]) - (a[1] - all.get(a[0]))).slice(0, 2).map(([text]) => text).join(", ");
  };

  const layOut = () => {
    const stored = data.layers.map((_, l) => l).filter((l) => data.planes[state.task][l]);
    let wanted = [[state.task, state.layer]];
    if (state.panels === "tasks") wanted = data.tasks.map((_, t) => [t, state.layer]);
    if (state.panels === "models") wanted = data.stages.map((_, s) => [state.task, state.layer, s]);
    if (state.panels === "layers" && stored.length) wanted = stored.length <= 6 ? stored.map((l) => [state.task, l]) : [0, 1, 2, 3, 4, 5].map((k) => [state.task, stored[Math.round((k * (stored.length - 1)) / 5)]]);
    const isSame = panels.length === wanted.length && panels.every((panel, at) => panel.task === wanted[at][0] && panel.stage === (wanted[at][2] ?? null));
    if (isSame) wanted.forEach(([task, layer], at) => { if (panels[at].layer !== layer) panels[at].moveTo(task, layer); });
    else {
      panels = wanted.map(([task, layer, stage]) => new Panel(task, layer, stage));
      $("scatters").replaceChildren(...panels.map((panel) => panel.box));
      $("scatters").dataset.many = panels.length > 1;
    }
    for (const panel of panels) panel.place();
  };

  // ---- one frame -------------------------------------------------------------------------------------------------
  // While points move, a frame that takes longer than this draws fewer of them.
  const FRAME = 30, MOST_SKIPPED = 16;
  let isWaiting = false, playing = null, stride = 1, isDragged = false;
  const redraw = () => { if (!isWaiting) { isWaiting = true; requestAnimationFrame(frame); } };
  const frame = (now) => {
    isWaiting = false;
    const isTravelling = !!playing;
    if (playing) travel(now);
    if (colouredStage !== stageAt()) { recolour(); if (isTravelling) showCaptions(); else { refilter(); refresh(); } }
    let isMoving = false;
    const begun = performance.now(), isByStage = panels.some((panel) => panel.stage !== null) && STAGED.includes(state.colour);
    for (const panel of panels) {
      if (isByStage) { stageDrawn = panel.stage; recolour(); stageDrawn = null; colouredStage = stageAt(); }
      if (isTravelling && panel.stage === null) panel.place();
      isMoving = panel.draw(now) || isMoving;
    }
    const took = performance.now() - begun;
    if (isMoving || playing || isDragged) stride = took > FRAME ? Math.min(MOST_SKIPPED, stride + 1) : took < FRAME / 3 ? Math.max(1, stride - 1) : stride;
    else stride = 1;
    $("thinned").textContent = stride > 1 ? `While it moves, one of ${stride} samples is drawn.` : "";
    explorer.frames++;
    if (isMoving || playing) redraw();
  };
  const travel = (now) => { // towards a stop, with a rest at each one between
    playing.since ??= now;
    const legs = Math.abs(playing.to - playing.from), time = (now - playing.since) / (LEG + REST), leg = Math.min(Math.floor(time), legs);
    const within = Math.min(1, ((time - leg) * (LEG + REST)) / LEG), eased = leg >= legs ? 0 : within * within * (3 - 2 * within);
    state.stage = playing.from + Math.sign(playing.to - playing.from) * Math.min(legs, leg + eased);
    if (time >= legs || calm.matches) { state.stage = playing.to; playing = null; showStage(); refilter(); refresh(); return; }
    showStage();
  };
  const goTo = (stage) => { playing = { from: state.stage, to: stage }; if (state.stage === stage) playing = null; showStage(); redraw(); };
  const showStage = () => {
    $("stage").value = state.stage;
    $("stage").setAttribute("aria-valuetext", data.stages[stageAt()].title);
    $("play").textContent = playing ? "❚❚ Pause" : "▶ Play";
    $("play").setAttribute("aria-pressed", String(!!playing));
    [...$("stops").children].forEach((stop, at) => stop.setAttribute("aria-pressed", String(at === stageAt())));
  };

  // ---- filters and selection -------------------------------------------------------------------------------------
  const refilter = () => {
    const words = state.search.toLowerCase().split(/\s+/).filter(Boolean), only = Object.entries(state.only).filter(([, set]) => set.size), ranges = Object.entries(state.ranges);
    for (let i = 0; i < N; i++) {
      passes[i] = isShownTask(taskOf[i]) && words.every((word) => haystack[i].includes(word)) && only.every(([key, set]) => set.has(COLUMNS[key].of(i))) &&
        ranges.every(([key, [low, high]]) => COLUMNS[key].of(i) >= low && COLUMNS[key].of(i) <= high) ? 1 : 0;
    }
    state.page = 0;
    for (const panel of panels) panel.labels = null;
  };
  const choose = (indices, how = "new") => {
    if (how === "new") chosen.fill(0);
    for (const i of indices) chosen[i] = how === "less" ? 0 : 1;
    numChosen = chosen.reduce((a, b) => a + b, 0);
    state.page = 0; state.name = "";
    refresh();
  };
  const within = () => { // the samples that all numbers are of: those selected, or all that are shown
    const list = [];
    for (let i = 0; i < N; i++) if (passes[i] && (!numChosen || chosen[i])) list.push(i);
    return list;
  };
  const refresh = () => { // everything but positions
    const list = within();
    showLegend(); showChips(); showSelected(list); showHistograms(list); showWall(list); showDetail(); showCaptions(); keep();
    redraw();
  };

  // ---- small things ----------------------------------------------------------------------------------------------
  function made(kind, name = "", text = "") {
    const element = document.createElement(kind);
    if (name) element.className = name;
    if (text !== "") element.textContent = text;
    return element;
  }
  const button = (text, name, act, pressed) => {
    const element = made("button", name, text);
    element.type = "button";
    element.onclick = act;
    if (pressed !== undefined) element.setAttribute("aria-pressed", String(pressed));
    return element;
  };
  const tabled = (head, rows, name = "", caption = "") => {
    const table = made("table", name), top = table.createTHead().insertRow(), body = table.createTBody();
    if (caption) table.createCaption().textContent = caption;
    for (const text of head) { const cell = made("th", "", text); cell.scope = "col"; top.append(cell); }
    for (const cells of rows) {
      const row = body.insertRow();
      for (const cell of cells) { const place = row.insertCell(); cell instanceof Node ? place.append(cell) : (place.textContent = cell); }
    }
    return table;
  };
  const short = (layer) => data.layers[layer].replace(/ \(layer.*/, "");
  const digits = (x, places = 3) => (Number.isFinite(x) ? (Math.abs(x) >= 1000 || x === 0 ? x.toFixed(0) : x.toPrecision(places)) : "–");
  const percent = (x) => (Number.isFinite(x) ? `${(100 * x).toFixed(1)} %` : "–");
  const word = (at) => (at < 0 ? "–" : data.words[at]);
  const isRight = (stage, i) => column.right[stage * N + i];
  const mark = (stage, i) => ({ 0: "✗", 1: "✓" }[isRight(stage, i)] ?? (column.answers[stage * N + i] >= 0 && column.answers[stage * N + i] !== column.answers[EXPERT * N + i] ? "≠" : ""));
  const wilson = (k, n) => { // a 95 % interval that stays inside 0 and 1
    if (!n) return [NaN, NaN];
    const z = 1.959964, p = k / n, middle = (p + (z * z) / (2 * n)) / (1 + (z * z) / n), half = (z * Math.sqrt((p * (1 - p)) / n + (z * z) / (4 * n * n))) / (1 + (z * z) / n);
    return [middle - half, middle + half];
  };
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  const half = (values) => { // of the 95 % interval of a mean, by Student's t (its expansion, good from three degrees on)
    const v = values.length - 1, z = 1.959964, m = mean(values);
    if (v < 1) return NaN;
    const t = v === 1 ? 12.7062 : v === 2 ? 4.3027 : z + (z ** 3 + z) / (4 * v) + (5 * z ** 5 + 16 * z ** 3 + 3 * z) / (96 * v * v) + (3 * z ** 7 + 19 * z ** 5 + 17 * z ** 3 - 15 * z) / (384 * v ** 3);
    return t * Math.sqrt(values.reduce((sum, x) => sum + (x - m) ** 2, 0) / v / (v + 1));
  };
  const picture = (i, size) => {
    const at = pictures.places[i];
    if (at < 0) return null;
    const box = made("span", "picture"), c = at % pictures.columns, r = Math.floor(at / pictures.columns);
    Object.assign(box.style, { width: `${size}px`, height: `${size}px`, backgroundImage: `url(${pictures.image})`, backgroundSize: `${pictures.columns * size}px ${pictures.rows * size}px`, backgroundPosition: `${-c * size}px ${-r * size}px` });
    return box;
  };
  const swatch = (colour, shape) => { const sign = made("span", "swatch", GLYPHS[shape]); sign.style.color = css(colour); sign.setAttribute("aria-hidden", "true"); return sign; };
  const toggled = (key, at) => { const set = (state.only[key] ??= new Set()); set.has(at) ? set.delete(at) : set.add(at); refilter(); refresh(); };
  const counts = (key, list) => {
    const { of, names } = COLUMNS[key], sums = new Int32Array(names.length), found = new Map();
    for (const i of list) { const at = of(i); if (at >= 0) sums[at]++; }
    sums.forEach((sum, at) => { if (sum) found.set(at, sum); });
    return found;
  };
  let ofTasks = { key: "" };
  const inTasks = () => {
    const key = state.panels === "tasks" ? "all" : String(state.task);
    if (ofTasks.key !== key) ofTasks = { key, list: Array.from({ length: N }, (_, i) => i).filter((i) => isShownTask(taskOf[i])) };
    return ofTasks.list;
  };

  // ---- what is shown beside the points ---------------------------------------------------------------------------
  const showLegend = () => {
    const key = state.colour, { names, title } = COLUMNS[key], box = $("legend");
    if (!names) {
      const bar = made("span", "gradient");
      bar.style.background = `linear-gradient(90deg, ${ink.scale.map(css).join(", ")})`;
      box.replaceChildren(made("span", "", `${title} ${digits(extent[0])}`), bar, made("span", "", digits(extent[1])));
      return;
    }
    const found = [...counts(key, inTasks())].sort((a, b) => a[0] - b[0]);
    box.replaceChildren(...found.slice(0, MOST_NAMED).map(([at, count]) => {
      const entry = button("", "entry", () => toggled(key, at), !!state.only[key]?.has(at));
      entry.append(swatch(...lookOf(key, at)), made("span", "", `${names[at]} ${count}`));
      return entry;
    }), ...(found.length > MOST_NAMED ? [made("span", "quiet", `and ${found.length - MOST_NAMED} more, told by colour and shape`)] : []));
  };
  const showChips = () => {
    const found = counts("outcome", inTasks());
    const chipOf = (key, at, name, count, meaning) => {
      if (!count && !state.only[key]?.has(at)) return null;
      const chip = button(`${name} ${count ?? 0}`, `chip ${GOOD.includes(name) ? "good" : "bad"}`, () => toggled(key, at), !!state.only[key]?.has(at));
      chip.title = meaning; chip.dataset.outcome = name;
      return chip;
    };
    const flips = chipOf("flip", 1, "flipped", counts("flip", inTasks()).get(1), `${data.stages[stageAt()].title} differs from the expert`);
    const chips = [...data.outcomes.map(([name, meaning], at) => chipOf("outcome", at, name, found.get(at), meaning)), flips].filter(Boolean);
    const isFiltered = state.search || Object.values(state.only).some((set) => set.size) || Object.keys(state.ranges).length;
    if (isFiltered) chips.push(button("Show all", "chip", () => { state.search = $("search").value = ""; state.only = {}; state.ranges = {}; refilter(); refresh(); }));
    $("chips").replaceChildren(...chips);
  };
  const showCaptions = () => {
    for (const panel of panels) {
      const stage = panel.stage ?? stageAt();
      const task = data.tasks[panel.task], model = data.stages[stage].title;
      let right = 0, n = 0;
      for (let i = task.start; i < task.start + task.n; i++) if (isRight(stage, i) >= 0) { n++; right += isRight(stage, i); }
      const plane = panel.plane, drawn = plane && !plane.stages.includes(stage) ? data.stages[plane.stages.find((at) => at >= stage) ?? plane.stages.at(-1)].title : "";
      const said = (n ? `, ${right} of ${n} right` : "") + (drawn ? `; its features are not stored here, drawn is ${drawn}` : "");
      const [strong, rest] = [made("strong", "", task.name), made("span", "quiet", ` ${data.layers[panel.layer]} · ${model}${said}`)];
      panel.caption.replaceChildren(strong, rest);
      panel.canvas.setAttribute("aria-label", `Samples of ${task.name} at ${data.layers[panel.layer]}, ${model}${said}. Arrow keys go from sample to sample, Enter opens one, Space selects it, B begins a box.`);
    }
    $("layer-name").textContent = data.layers[state.layer];
  };

  const showSelected = (list) => {
    const box = $("selected"), parts = [], total = inTasks().length;
    const what = numChosen ? state.name || "Selected" : list.length < total ? "Shown" : "All samples";
    parts.push(made("h2", "", `${what}: ${list.length} of ${total}`));
    const stages = data.stages.map((_, s) => s);
    const rows = stages.map((s) => {
      const known = list.filter((i) => isRight(s, i) >= 0), k = known.filter((i) => isRight(s, i)).length, [low, high] = wilson(k, known.length);
      const drifts = s === EXPERT ? [] : list.map((i) => at3(column.drift, s, state.layer, i)).filter(Number.isFinite);
      const accuracy = known.length ? `${percent(k / known.length)} (${(100 * low).toFixed(0)} to ${(100 * high).toFixed(0)})` : "–";
      return [data.stages[s].title, accuracy, drifts.length ? `${digits(mean(drifts))}${drifts.length > 1 ? ` ± ${digits(half(drifts), 2)}` : ""}` : "–"];
    });
    parts.push(tabled(["model", "right (95 %)", "mean drift"], rows, "numbers", `n = ${list.length}, drift at ${data.layers[state.layer]}`));
    if (list.length && list.length < total) parts.push(common(list));
    if (list.length) parts.push(explained(list));
    const name = made("input"); name.placeholder = "name of this selection"; name.value = state.name; name.setAttribute("aria-label", "Name of this selection");
    name.maxLength = 60;
    name.onchange = () => { state.name = name.value.trim(); keep(); };
    const acts = made("div", "bar");
    acts.append(button("Select shown", "", () => choose(list)), button("Keep", "", () => { saved = saved.filter((each) => each.name !== (state.name || "selection")); saved.push({ name: state.name || `selection`, bits: bitsOf() }); refresh(); }),
      button("CSV", "", () => hand("csv", list)), button("JSON", "", () => hand("json", list)));
    parts.push(name, acts);
    if (saved.length) {
      const kept = made("div", "bar kept");
      for (const each of saved) kept.append(button(each.name, "chip", () => { fromBits(each.bits); state.name = each.name; refresh(); }), Object.assign(button("×", "chip", () => { saved = saved.filter((other) => other !== each); refresh(); }), { ariaLabel: `Forget ${each.name}` }));
      parts.push(kept);
    }
    box.replaceChildren(...parts);
  };
  const common = (list) => {
    const box = made("details", "common");
    box.append(made("summary", "", "What these samples have in common"));
    box.open = state.isCompared;
    box.ontoggle = () => { if (state.isCompared !== box.open) { state.isCompared = box.open; refresh(); } };
    if (!state.isCompared) return box;
    const found = separating(list), rows = found.map(({ key, text, here, there }) => [button(text, "link", () => setColour(key)), percent(here), percent(there)]);
    box.append(found.length ? tabled(["column and values", "here", "elsewhere"], rows, "numbers", `Columns that best separate these samples from the other shown ones, best first; a click colours by one. Left out: differences that chance may explain (95 %).${inTasks().length > MOST_RANKED ? ` Compared: at most ${MOST_RANKED} samples of each side.` : ""}`) : made("p", "quiet", "No column separates these samples from the others by more than chance may explain."));
    return box;
  };
  // The largest difference of shares, here and elsewhere: over all thresholds of numbers (Kolmogorov and Smirnov), over single values of names.
  const MOST_RANKED = 10000, thinned = (all) => { const step = Math.ceil(all.length / MOST_RANKED); return step > 1 ? all.filter((_, at) => at % step === 0) : all; };
  const separating = (list) => {
    const inside = new Set(list), others = thinned(inTasks().filter((i) => !inside.has(i))), found = [];
    list = thinned(list);
    const n = list.length, m = others.length;
    if (!n || !m) return found;
    const limit = (choices, a, b) => Math.sqrt(Math.log((2 * choices) / 0.05) / 2) * Math.sqrt((a + b) / (a * b)); // by Massart; several choices by Bonferroni
    const best = (key, title, all, a = n, b = m) => { // all: name, share here, share elsewhere; of a and b samples
      const [name, here, there] = all.reduce((one, other) => (Math.abs(other[1] - other[2]) > Math.abs(one[1] - one[2]) ? other : one), ["", 0, 0]);
      if (name !== "" && Math.abs(here - there) > limit(all.length, a, b)) found.push({ key, text: `${title}: ${name}`, here, there });
    };
    for (const key of HISTOGRAMS) {
      if (DEFINING.includes(key) || state.only[key]?.size || state.ranges[key]) continue;
      const { of, names, title } = COLUMNS[key];
      if (names) { const [here, there] = [counts(key, list), counts(key, others)]; best(key, title, [...new Set([...here.keys(), ...there.keys()])].map((at) => [names[at], (here.get(at) ?? 0) / n, (there.get(at) ?? 0) / m])); continue; }
      const values = [...list.map((i) => [of(i), 1]), ...others.map((i) => [of(i), 0])].filter(([x]) => Number.isFinite(x)).sort((a, b) => a[0] - b[0]);
      const all = [values.reduce((sum, [, is]) => sum + is, 0), 0]; all[1] = values.length - all[0];
      let [a, b, top] = [0, 0, ["", 0, 0]];
      values.forEach(([x, is], at) => {
        is ? a++ : b++;
        if (at + 1 < values.length && values[at + 1][0] === x) return; // equal values are on one side
        const [here, there] = [a / all[0], b / all[1]];
        if (Math.abs(here - there) > Math.abs(top[1] - top[2])) top = here > there ? [`at most ${digits(x)}`, here, there] : [`above ${digits(x)}`, 1 - here, 1 - there];
      });
      if (all[0] && all[1]) best(key, title, [top], ...all);
    }
    const seen = (of) => { const sums = new Map(); for (const i of of) for (const text of wordsOf(i)) sums.set(text, (sums.get(text) ?? 0) + 1); return sums; };
    const [here, there] = [seen(list), seen(others)], vocabulary = [...new Set([...here.keys(), ...there.keys()])];
    if (vocabulary.length) best("class", "word", vocabulary.map((text) => [text, (here.get(text) ?? 0) / n, (there.get(text) ?? 0) / m]));
    return found.sort((a, b) => Math.abs(b.here - b.there) - Math.abs(a.here - a.there));
  };
  const explained = (list) => {
    const box = made("details", "explain");
    box.append(made("summary", "", "Explain this selection"));
    box.open = state.isExplained;
    box.ontoggle = () => { if (state.isExplained !== box.open) { state.isExplained = box.open; refresh(); } };
    if (!state.isExplained) return box;
    const stage = changed(), inside = new Set(list), others = inTasks().filter((i) => !inside.has(i));
    const told = (values, l, of) => { // mean, and the squared standard error of it
      let n = 0, sum = 0, squares = 0;
      for (const i of of) { const x = at3(values, stage, l, i); if (Number.isFinite(x)) { n++; sum += x; squares += x * x; } }
      return { mean: n ? sum / n : NaN, error: n > 1 ? Math.max(0, squares - (sum * sum) / n) / (n - 1) / n : NaN };
    };
    const rows = data.layers.map((_, l) => {
      const [adds, passes, drift, share] = [column.mismatch, column.propagation, column.drift, column.share].map((values) => told(values, l, list));
      const rest = told(column.mismatch, l, others), more = adds.mean / rest.mean;
      // Clearly more than elsewhere: by two standard errors of the difference, and by a twentieth.
      return { l, more, isMore: more >= 1.05 && adds.mean - rest.mean > 2 * Math.sqrt(adds.error + rest.error), adds: adds.mean, passes: passes.mean, drift: drift.mean, share: share.mean };
    });
    const traced = list.filter((i) => data.layers.some((_, l) => Number.isFinite(at3(column.share, stage, l, i)))).length, model = data.stages[stage].title;
    const unusual = rows.filter((row) => row.isMore).sort((a, b) => b.more - a.more).slice(0, 2);
    const carried = rows.filter((row) => row.share > 0).sort((a, b) => b.share - a.share).slice(0, 2), lines = [];
    if (carried.length) lines.push(`For this selection ${carried.map((row) => `${data.layers[row.l]} accounts for ${percent(row.share)}`).join(", ")} of ${model}'s final drift (${traced} of ${list.length} samples traced).`);
    else lines.push("No sample here was traced back to layers; the table shows each layer's own error.");
    if (others.length && !unusual.length) lines.push("No layer adds clearly more here than for other shown samples.");
    if (unusual.length) lines.push(`Against the other samples shown, ${unusual.map((row) => `${data.layers[row.l]} adds ${digits(row.more)} times as much`).join(", ")}.`);
    box.append(...lines.map((line) => made("p", "", line)), tabled(["layer", "adds", "passes on", "drift", "share"], rows.map((row) => [short(row.l), digits(row.adds), digits(row.passes), digits(row.drift), percent(row.share)]), "numbers", `${model}: mean norms, by layer`));
    return box;
  };

  // ---- histograms ------------------------------------------------------------------------------------------------
  const HISTOGRAMS = Object.keys(COLUMNS).filter(hasAny);
  const showHistograms = (list) => {
    const all = inTasks();
    $("histograms").replaceChildren(made("h2", "", "Columns"), ...HISTOGRAMS.map((key) => (COLUMNS[key].names ? barsOf(key, all, list) : binsOf(key, all, list))));
  };
  const folded = (key, title) => { // a part that is made once it is opened
    const box = made("details", "histogram");
    box.append(made("summary", "", title));
    box.open = !!state.open[key];
    box.ontoggle = () => { if (state.open[key] !== box.open) { state.open[key] = box.open; refresh(); } };
    return box;
  };
  const barsOf = (key, all, list) => {
    const box = folded(key, COLUMNS[key].title);
    if (!box.open) return box;
    const found = [...counts(key, all)].sort((a, b) => b[1] - a[1]), part = counts(key, list), top = found[0]?.[1] ?? 1;
    box.append(...found.slice(0, MOST_NAMED).map(([at, count]) => {
      const row = button("", "bar-row", () => toggled(key, at), !!state.only[key]?.has(at)), back = made("span", "back"), front = made("span", "front");
      for (const [bar, size] of [[back, count], [front, part.get(at) ?? 0]]) bar.style.width = `calc((100% - 5.2rem) * ${size / top})`; // room for the count
      if (state.colour === key) front.style.background = css(lookOf(key, at)[0]);
      row.append(back, front, made("span", "name", COLUMNS[key].names[at]), made("span", "count", `${part.get(at) ?? 0} of ${count}`));
      return row;
    }));
    if (found.length > MOST_NAMED) box.append(made("p", "quiet", `and ${found.length - MOST_NAMED} more: search for them`));
    return box;
  };
  const binsOf = (key, all, list) => {
    const { of, title } = COLUMNS[key], box = folded(key, title + (LAYERED.includes(key) ? ` at ${data.layers[state.layer]}` : ""));
    if (!box.open) return box;
    const values = all.map(of).filter(Number.isFinite);
    const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity), width = (high - low) / BINS || 1;
    const binned = (of_) => { const bins = new Array(BINS).fill(0); for (const x of of_) if (Number.isFinite(x)) bins[Math.min(BINS - 1, Math.floor((x - low) / width))]++; return bins; };
    const back = binned(values), front = binned(list.map(of)), top = Math.max(...back, 1), plot = made("div", "bins");
    if (!values.length) { box.append(made("p", "quiet", "Not measured for this model.")); return box; }
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `${title}: ${back.map((count, at) => (count ? `${digits(low + at * width)} to ${digits(low + (at + 1) * width)}: ${front[at]} of ${count}` : "")).filter(Boolean).join("; ")}`);
    plot.append(...back.map((count, at) => { const bin = made("span", "bin"), a = made("i"), b = made("b"); a.style.height = `${(100 * count) / top}%`; b.style.height = `${(100 * front[at]) / top}%`; bin.append(a, b); return bin; }));
    let from = null;
    const valueAt = (event) => { const rect = plot.getBoundingClientRect(); return low + Math.min(1, Math.max(0, (event.clientX - rect.left) / rect.width)) * (high - low); };
    plot.onpointerdown = (event) => { from = valueAt(event); plot.setPointerCapture(event.pointerId); event.preventDefault(); };
    plot.onpointerup = (event) => { const to = valueAt(event); if (from !== null) setRange(key, Math.abs(to - from) < width / 2 ? null : [Math.min(from, to), Math.max(from, to)]); from = null; };
    const ends = made("div", "bar ends"), range = state.ranges[key];
    const inputs = ["from", "to"].map((name, at) => { const input = made("input"); input.type = "number"; input.step = "any"; input.setAttribute("aria-label", `${title} ${name}`); input.value = range && Number.isFinite(range[at]) ? Number(range[at].toPrecision(4)) : ""; input.placeholder = digits(at ? high : low); return input; });
    for (const input of inputs) input.onchange = () => { const [a, b] = inputs.map((each) => (each.value === "" ? NaN : Number(each.value))); setRange(key, Number.isNaN(a) && Number.isNaN(b) ? null : [Number.isNaN(a) ? -Infinity : a, Number.isNaN(b) ? Infinity : b]); };
    ends.append(inputs[0], made("span", "", "to"), inputs[1]);
    const numbers = folded(`${key} table`, "As table");
    if (numbers.open) numbers.append(tabled(["from", "to", "here", "of all"], back.map((count, at) => [digits(low + at * width), digits(low + (at + 1) * width), front[at], count]), "numbers"));
    box.append(plot, ends, numbers);
    return box;
  };
  const setRange = (key, range) => { if (range) state.ranges[key] = range; else delete state.ranges[key]; refilter(); refresh(); };

  // ---- the wall, and one sample ----------------------------------------------------------------------------------
  const SORTS = { drift: (i) => COLUMNS.drift.of(i), margin: (i) => column.margin[i], confidence: (i) => COLUMNS.confidence.of(i), class: (i) => word(column.label[i]), id: (i) => data.ids[i] };
  let order = { key: "" };
  const inOrder = (list) => { // numbers from high to low, the unknown last; names by the alphabet; sorted once for all samples
    const key = `${state.sort} ${stageAt()} ${state.layer}`;
    if (order.key !== key) {
      const of = SORTS[state.sort], values = Array.from({ length: N }, (_, i) => of(i)), places = new Uint32Array(N).map((_, i) => i);
      const names = new Intl.Collator(undefined, { numeric: true }), low = (x) => (Number.isFinite(x) ? x : -Infinity);
      if (typeof values[0] === "string") places.sort((a, b) => names.compare(values[a], values[b]));
      else { const numbers = Float64Array.from(values, low); places.sort((a, b) => numbers[b] - numbers[a] || a - b); }
      order = { key, places };
    }
    const wanted = new Uint8Array(N);
    for (const i of list) wanted[i] = 1;
    return order.places.filter((i) => wanted[i]);
  };
  const groupsOf = (ordered) => CHANGED.map((name) => { const at = outcomeNames.indexOf(name); return { name, meaning: data.outcomes[at][1], list: ordered.filter((i) => outcomes[state.repair][i] === at) }; }).filter(({ list }) => list.length);
  const showWall = (list) => {
    const ordered = Array.from(inOrder(list)), groups = state.as === "groups" ? groupsOf(ordered) : [];
    const longest = groups.length ? Math.max(...groups.map((group) => group.list.length)) : ordered.length, each = groups.length ? PER_GROUP : PER_PAGE;
    const pages = Math.max(1, Math.ceil(longest / each)), onPage = (all) => all.slice(state.page * each, (state.page + 1) * each);
    state.page = Math.min(state.page, pages - 1);
    const shown = onPage(ordered);
    const changes = groups.reduce((sum, group) => sum + group.list.length, 0);
    $("wall-title").textContent = `${state.as === "groups" ? `${changes} of ` : ""}${list.length} ${list.length === 1 ? "sample" : "samples"}`;
    $("page").textContent = `page ${state.page + 1} of ${pages}`;
    $("back").disabled = state.page === 0; $("on").disabled = state.page === pages - 1;
    const box = $("cards"), look = shown.some((i) => data.texts[i]) ? "cards texts" : "cards";
    box.className = { cards: look, groups: "groups", table: "scroll" }[state.as];
    if (state.as === "groups") {
      box.replaceChildren(...groups.map(({ name, meaning, list: all }) => {
        const group = made("section", ""), cards = made("div", look);
        cards.append(...onPage(all).map(cardOf));
        group.dataset.outcome = name;
        group.append(made("h3", "", `${meaning.replace(/\.$/, "")} (${all.length})`), cards);
        return group;
      }), ...(groups.length ? [] : [made("p", "quiet", "Neither merge nor repair changed an answer here.")]));
    } else box.replaceChildren(...(state.as === "cards" ? shown.map(cardOf) : [tableOf(shown)]));
  };
  const outcomeOf = (i) => outcomeNames[outcomes[state.repair][i]] ?? "";
  const badge = (name) => made("span", `outcome ${GOOD.includes(name) ? "good" : "bad"}`, name);
  const saysOf = (i) => [EXPERT, ...data.stages.map((_, s) => s).filter((s) => s !== EXPERT)].filter((s) => column.answers[s * N + i] >= 0).map((s) => [data.stages[s].title, word(column.answers[s * N + i]), mark(s, i)]);
  const cardOf = (i) => {
    const card = button("", "card", () => pick(i)), image = picture(i, 72), says = made("span", "says");
    card.dataset.sample = data.ids[i];
    if (i === state.picked) card.setAttribute("aria-current", "true");
    if (image) card.append(image);
    if (data.texts[i]) card.append(made("span", "text", data.texts[i]));
    if (outcomeOf(i)) card.append(badge(outcomeOf(i)));
    if (column.label[i] >= 0) says.append(made("span", "who", "class"), made("span", "", word(column.label[i])));
    for (const [who, what, sign] of saysOf(i)) says.append(made("span", "who", who), made("span", { "✓": "good", "✗": "bad" }[sign] ?? "", `${what}\u00a0${sign}`));
    if (Number.isFinite(COLUMNS.drift.of(i))) says.append(made("span", "who", "drift"), made("span", "", digits(COLUMNS.drift.of(i))));
    card.append(says, made("span", "id", data.ids[i]));
    return card;
  };
  const tableOf = (shown) => {
    const stages = data.stages.map((_, s) => s);
    return tabled(["sample", "task", "class", ...(hasOutcome ? ["outcome"] : []), ...stages.map((s) => data.stages[s].title), ...stages.filter((s) => s !== EXPERT).map((s) => `drift, ${data.stages[s].title}`)], shown.map((i) => [button(data.ids[i], "link", () => pick(i)), data.tasks[taskOf[i]].name, word(column.label[i]), ...(hasOutcome ? [outcomeOf(i)] : []), ...stages.map((s) => `${word(column.answers[s * N + i])} ${mark(s, i)}`), ...stages.filter((s) => s !== EXPERT).map((s) => digits(at3(column.drift, s, state.layer, i)))]), "numbers", "Samples that are shown");
  };
  const pick = (i) => {
    state.picked = i;
    if (i >= 0 && !isShownTask(taskOf[i])) setTask(taskOf[i]);
    refresh();
    if (i < 0) return;
    $("detail").scrollIntoView({ block: "nearest", behavior: calm.matches ? "auto" : "smooth" });
  };
  const showDetail = () => {
    const i = state.picked, box = $("detail");
    box.hidden = i < 0;
    if (i < 0) return box.replaceChildren();
    const head = made("div", "bar"), stage = changed();
    head.append(made("h2", "", `Sample ${data.ids[i]}`), ...(outcomeOf(i) ? [badge(outcomeOf(i))] : []), Object.assign(button("×", "close", () => pick(-1)), { ariaLabel: "Close this sample" }));
    const body = made("div", "columns"), left = made("div"), image = picture(i, 144);
    if (data.texts[i]) left.append(made("p", "said", data.texts[i]));
    const models = data.stages.map((_, s) => s).map((s) => [data.stages[s].title, `${word(column.answers[s * N + i])} ${mark(s, i)}`, digits(column.confidence[s * N + i]), s === EXPERT ? "–" : digits(at3(column.drift, s, state.layer, i))]);
    left.append(tabled(["model", "says", "confidence", "drift"], models, "numbers", `${data.tasks[taskOf[i]].name}, class ${word(column.label[i])}; expert's margin ${digits(column.margin[i])}`));
    const rows = data.layers.map((_, l) => [short(l), ...[column.mismatch, column.propagation, column.drift].map((of) => digits(at3(of, stage, l, i))), percent(at3(column.share, stage, l, i))]);
    if (image) left.prepend(image);
    const ways = made("div");
    ways.append(...(L > 1 ? [linesOf(i)] : []), tabled(["layer", "adds", "passes on", "drift", "share"], rows, "numbers", `${data.stages[stage].title}, layer by layer`));
    body.append(left, ways);
    return box.replaceChildren(head, body, ...neighboursOf(i));
  };
  const linesOf = (i) => { // drift by layer, a line each model; the numbers stand in the table beside it
    const W = 380, H = 150, [left, right, low] = [34, 80, H - 18], svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const add = (kind, given, text) => { const part = svg.appendChild(document.createElementNS(svg.namespaceURI, kind)); for (const [key, value] of Object.entries(given)) part.setAttribute(key, value); if (text) part.textContent = text; };
    const lines = data.stages.map((_, s) => data.layers.map((_, l) => at3(column.drift, s, l, i))).map((values, s) => ({ s, values })).filter(({ s, values }) => s !== EXPERT && values.some(Number.isFinite));
    const top = Math.max(...lines.flatMap(({ values }) => values.filter(Number.isFinite))) || 1, x = (l) => left + ((W - left - right) * l) / Math.max(1, L - 1), y = (value) => low - ((low - 8) * value) / top;
    Object.entries({ viewBox: `0 0 ${W} ${H}`, class: "lines", role: "img", "aria-label": `Drift by layer: ${lines.map(({ s, values }) => `${data.stages[s].title} ${values.map((value) => digits(value)).join(", ")}`).join("; ")}` }).forEach(([key, value]) => svg.setAttribute(key, value));
    add("path", { class: "axis", d: `M${left} 8V${low}H${W - right}` });
    add("text", { x: 0, y: 12 }, digits(top)); add("text", { x: 0, y: low }, "0"); add("text", { x: left, y: H - 4 }, short(0)); add("text", { x: W - right, y: H - 4, "text-anchor": "end" }, short(L - 1));
    let above = -Infinity; // labels that would lie on one another move down
    for (const { s, values } of [...lines].sort((a, b) => (b.values[L - 1] || 0) - (a.values[L - 1] || 0))) {
      const colour = data.stages[s].colours[Number(isDark())], place = (above = Math.max(above + 12, y(values[L - 1] || 0) + 4));
      add("path", { stroke: colour, d: values.map((value, l) => (Number.isFinite(value) ? `${l && Number.isFinite(values[l - 1]) ? "L" : "M"}${x(l)} ${y(value)}` : "")).join("") });
      add("text", { x: W - right + 6, y: place }, data.stages[s].title);
    }
    return svg;
  };
  const neighboursOf = (i) => {
    const plane = planeOf(taskOf[i], state.layer), start = data.tasks[taskOf[i]].start, n = data.tasks[taskOf[i]].n;
    if (!plane?.near.length) return [];
    const of = (at) => Array.from(plane.near.subarray((at * n + i - start) * K, (at * n + i - start + 1) * K)).filter((j) => j >= 0);
    const experts = new Set(of(plane.stages.indexOf(EXPERT)));
    const rows = plane.stages.map((s, at) => {
      const row = made("div", "near"), near = of(at), shared = near.filter((j) => experts.has(j)).length;
      row.append(made("span", "who", s === EXPERT ? data.stages[s].title : `${data.stages[s].title}: ${shared} of ${near.length} neighbours in common with the expert`));
      for (const j of near) {
        const g = start + j, same = column.label[g] < 0 || column.label[i] < 0 ? "" : column.label[g] === column.label[i] ? "good" : "bad";
        const entry = button("", `neighbour ${same}`, () => pick(g)), image = picture(g, 40);
        if (image) entry.append(image);
        entry.append(made("span", "", column.label[g] >= 0 ? word(column.label[g]) : data.ids[g]));
        entry.setAttribute("aria-label", `${data.ids[g]}, class ${word(column.label[g])}`);
        row.append(entry);
      }
      return row;
    });
    return [made("h3", "", `Nearest neighbours in each model's features at ${data.layers[state.layer]}`), ...rows];
  };

  // ---- handing out, and keeping in the address -------------------------------------------------------------------
  const hand = (kind, list) => {
    const rows = list.map((i) => ({ task: data.tasks[taskOf[i]].name, sample_id: data.ids[i] })), name = state.name || "selection";
    // A spreadsheet would take what begins like a formula for one.
    const cell = (text) => `"${(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
    const text = kind === "json" ? JSON.stringify({ run: data.run.id, name, samples: rows }, null, 1) : ["task,sample_id", ...rows.map((row) => `${cell(row.task)},${cell(row.sample_id)}`), ""].join("\n");
    const link = made("a");
    link.href = URL.createObjectURL(new Blob([text], { type: kind === "json" ? "application/json" : "text/csv" }));
    link.download = `${name.replace(/[^\w.-]+/g, "_")}.${kind}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const bitsOf = () => {
    const bytes = new Uint8Array(Math.ceil(N / 8));
    for (let i = 0; i < N; i++) if (chosen[i]) bytes[i >> 3] |= 1 << (i & 7);
    return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join("")).replaceAll("+", "-").replaceAll("/", "_").replace(/(A*=*)$/, "");
  };
  const fromBits = (text) => {
    chosen.fill(0);
    try {
      const plain = text.replaceAll("-", "+").replaceAll("_", "/"), raw = atob(plain + "A".repeat((4 - (plain.length % 4)) % 4));
      for (let i = 0; i < N; i++) chosen[i] = ((raw.charCodeAt(i >> 3) || 0) >> (i & 7)) & 1;
    } catch { /* an address that somebody has cut selects nothing */ }
    numChosen = chosen.reduce((a, b) => a + b, 0);
  };
  const NAMES = { task: data.tasks.map((task) => task.name), stage: data.stages.map((stage) => stage.name), repair: repairs };
  const PLAIN = { task: "number", layer: "number", stage: "number", repair: "number", picked: "number", panels: "string", colour: "string", sort: "string", as: "string", search: "string", name: "string" };
  const first = Object.fromEntries(Object.keys(PLAIN).map((key) => [key, state[key]]));
  let keeping = 0;
  const keep = () => { clearTimeout(keeping); keeping = setTimeout(write, 250); };
  const stateText = () => {
    const said = new URLSearchParams();
    for (const key of Object.keys(PLAIN)) {
      const value = key === "stage" ? stageAt() : state[key];
      if (value !== first[key] || (hosted && key === "task")) said.set(key, NAMES[key]?.[value] ?? value);
    }
    for (const [key, set] of Object.entries(state.only)) if (set.size) said.set(`only.${key}`, [...set].join());
    for (const [key, range] of Object.entries(state.ranges)) said.set(`range.${key}`, range.join());
    if (numChosen) said.set("selected", bitsOf());
    for (const each of saved) said.append("kept", `${each.bits}:${each.name}`);
    return String(said);
  };
  const write = () => {
    if (hosted) tell({ state: stateText() });
    else try { history.replaceState(null, "", `#${stateText()}`); } catch { /* a frame of a notebook has no address of its own */ }
  };
  const LIMITS = { task: data.tasks.length, layer: L, stage: S, repair: repairs.length, picked: N };
  const LISTS = { panels: ["one", "models", "layers", "tasks"], colour: Object.keys(COLUMNS), sort: Object.keys(SORTS), as: ["cards", "groups", "table"] };
  const read = () => {
    const said = new URLSearchParams(hosted ? hosted.state : location.hash.slice(1));
    for (const [key, kind] of Object.entries(PLAIN)) {
      if (!said.has(key)) continue;
      const text = said.get(key), named = NAMES[key]?.indexOf(text) ?? -1, value = kind === "number" ? (named < 0 ? Number(text) : named) : text;
      if (key in LIMITS ? Number.isInteger(value) && value >= 0 && value < LIMITS[key] : !(key in LISTS) || LISTS[key].includes(value)) state[key] = value;
    }
    for (const key of Object.keys(COLUMNS)) {
      if (said.has(`only.${key}`)) state.only[key] = new Set(said.get(`only.${key}`).split(",").map(Number).filter(Number.isInteger));
      const range = said.get(`range.${key}`)?.split(",").map(Number);
      if (range?.length === 2 && !range.some(Number.isNaN)) state.ranges[key] = range;
    }
    saved = said.getAll("kept").map((text) => ({ bits: text.split(":")[0], name: text.slice(text.indexOf(":") + 1) }));
    if (said.has("selected")) fromBits(said.get("selected"));
  };

  // ---- hands and keys --------------------------------------------------------------------------------------------
  function listen(panel) {
    const canvas = panel.canvas, placed = (event) => { const box = canvas.getBoundingClientRect(); return [(event.clientX - box.left) * panel.dpr, (event.clientY - box.top) * panel.dpr]; };
    let start = null, pressed = null, isDrag = false; // a press that never leaves its place is a click, however long its path
    canvas.onpointerdown = (event) => {
      start = pressed = placed(event); isDrag = false;
      canvas.setPointerCapture(event.pointerId);
      panel.path = state.drag === "pan" ? null : [start];
      hideTip();
    };
    canvas.onpointermove = (event) => {
      const [x, y] = placed(event);
      if (!start) { hover(panel, x, y, event); return; }
      isDrag ||= Math.hypot(x - pressed[0], y - pressed[1]) > 4 * panel.dpr;
      if (state.drag === "pan") { isDragged = true; view.x -= (x - start[0]) / panel.zoom; view.y += (y - start[1]) / panel.zoom; start = [x, y]; } else if (state.drag === "box") panel.path = cornersOf(start, [x, y]);
      else panel.path.push([x, y]);
      redraw();
    };
    canvas.onpointerup = (event) => {
      const [x, y] = placed(event), path = panel.path;
      start = null; panel.path = null; isDragged = false;
      if (!isDrag) pick(panel.nearest(x, y, 14 * panel.dpr));
      else if (path) choose(inside(panel, path), event.shiftKey ? "more" : event.altKey ? "less" : "new");
      redraw();
    };
    canvas.onpointercancel = () => { start = panel.path = null; isDragged = false; redraw(); };
    canvas.onpointerleave = hideTip;
    const zoomAt = (event, by) => { // what is under the pointer stays there
      const [x, y] = placed(event), old = panel.zoom, sx = x - panel.W / 2, sy = y - panel.H / 2;
      zoom(by);
      panel.aim();
      view.x += sx / old - sx / panel.zoom; view.y += sy / panel.zoom - sy / old;
    };
    canvas.ondblclick = (event) => zoomAt(event, 2);
    canvas.addEventListener("wheel", (event) => { event.preventDefault(); zoomAt(event, Math.exp(-event.deltaY / 400)); settle(); }, { passive: false });
    canvas.onkeydown = (event) => steps(panel, event);
  }
  const inside = (panel, path) => {
    const found = [], xs = path.map(([x]) => x), ys = path.map(([, y]) => y);
    const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    for (let i = 0; i < panel.n; i++) {
      const [x, y] = panel.screen(i);
      if (!passes[panel.start + i] || !(x >= x0 && x <= x1 && y >= y0 && y <= y1)) continue;
      let is = false;
      for (let a = 0, b = path.length - 1; a < path.length; b = a++) if (ys[a] > y !== ys[b] > y && x < ((xs[b] - xs[a]) * (y - ys[a])) / (ys[b] - ys[a]) + xs[a]) is = !is;
      if (is) found.push(panel.start + i);
    }
    return found;
  };
  const spoken = (i) => [data.ids[i], ...(column.label[i] >= 0 ? [`class ${word(column.label[i])}`] : []), ...saysOf(i).map(([who, what, sign]) => `${who} says ${what} ${{ "✓": "(right)", "✗": "(wrong)", "≠": "(unlike the expert)" }[sign] ?? ""}`), ...(outcomeOf(i) ? [outcomeOf(i)] : [])].join(", ");
  const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const cornersOf = ([x0, y0], [x1, y1]) => [[x0, y0], [x1, y0], [x1, y1], [x0, y1]];
  const boxed = (panel, event) => { // a box by keys: arrows move a cross, Enter sets a corner and then selects what lies in the box
    const { rod, W, H } = panel, way = ARROWS[event.key], by = (event.shiftKey ? 0.1 : 0.02) * Math.min(W, H);
    if (way) rod.at = [Math.min(W, Math.max(0, rod.at[0] + way[0] * by)), Math.min(H, Math.max(0, rod.at[1] + way[1] * by))];
    else if (event.key === "Enter" && !rod.from) rod.from = rod.at;
    else if (event.key === "Enter") choose(inside(panel, panel.path), event.shiftKey ? "more" : event.altKey ? "less" : "new");
    else if (event.key !== "Escape") return;
    if (!way && (event.key === "Escape" || panel.path)) panel.rod = panel.path = null;
    else if (rod.from) panel.path = cornersOf(rod.from, rod.at);
    const n = panel.path ? inside(panel, panel.path).length : 0;
    $("live").textContent = panel.path ? `${n} samples in the box; Enter selects them` : panel.rod ? `corner at ${percent(rod.at[0] / W)} from the left, ${percent(rod.at[1] / H)} from the top` : numChosen ? `${numChosen} selected` : "no box";
    event.preventDefault();
    redraw();
  };
  const steps = (panel, event) => {
    if (panel.rod) return boxed(panel, event);
    const i = state.picked - panel.start, has = i >= 0 && i < panel.n, way = ARROWS[event.key];
    if (way) {
      const [x, y] = has ? panel.screen(i) : [panel.W / 2, panel.H / 2];
      let best = -1, least = Infinity;
      for (let j = 0; j < panel.n; j++) {
        if ((has && j === i) || !passes[panel.start + j]) continue;
        const [px, py] = panel.screen(j), along = (px - x) * way[0] + (py - y) * way[1], across = Math.abs((px - x) * way[1] + (py - y) * way[0]);
        if (has && along <= 0) continue;
        const cost = has ? along + 3 * across : Math.hypot(px - x, py - y);
        if (cost < least) [best, least] = [j, cost];
      }
      if (best >= 0) { state.picked = panel.start + best; $("live").textContent = spoken(state.picked); redraw(); keep(); }
    } else if (event.key === "Enter" && has) pick(state.picked);
    else if (event.key === " " && has) choose([state.picked], chosen[state.picked] ? "less" : "more");
    else if (event.key === "b" || event.key === "B") {
      panel.rod = { at: has ? panel.screen(i) : [panel.W / 2, panel.H / 2] };
      $("live").textContent = "Box: arrows move its corner, Enter sets it";
      redraw();
    } else if (event.key === "Escape") { pick(-1); choose([]); } else if (event.key === "+") zoom(1.4);
    else if (event.key === "-") zoom(1 / 1.4);
    else return;
    event.preventDefault();
  };
  const zoom = (by) => { view.k = Math.min(60, Math.max(0.5, view.k * by)); redraw(); };
  let settling = 0; // a turning wheel is a movement that ends a moment after its last turn
  const settle = () => { isDragged = true; clearTimeout(settling); settling = setTimeout(() => { isDragged = false; redraw(); }, 150); };
  const hideTip = () => { $("tip").hidden = true; };
  const hover = (panel, x, y, event) => {
    const i = panel.plane ? panel.nearest(x, y, 9 * panel.dpr) : -1, tip = $("tip");
    if (i < 0) return hideTip();
    const image = picture(i, 64), lines = [data.ids[i], `class ${word(column.label[i])}`, ...saysOf(i).map((says) => `${says[0]}: ${says[1]} ${says[2]}`)];
    if (data.texts[i]) lines.splice(1, 0, data.texts[i].slice(0, 90));
    tip.replaceChildren(...(image ? [image] : []), ...lines.map((line) => made("div", "", line)));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(innerWidth - box.width - 8, event.clientX + 16))}px`;
    tip.style.top = `${event.clientY + box.height + 24 > innerHeight ? event.clientY - box.height - 12 : event.clientY + 16}px`;
    return undefined;
  };
  const setColour = (key) => { state.colour = key; recolour(); showLegend(); showHistograms(within()); keep(); redraw(); };
  const setTask = (task) => { state.task = task; $("task").value = task; layOut(); refilter(); recolour(); };
  const filled = (select, entries, value, act) => {
    select.replaceChildren(...entries.map(([key, text]) => Object.assign(made("option", "", text), { value: key })));
    select.value = value;
    select.onchange = () => { act(select.value); };
  };

  const start = () => {
    readTheme(); read();
    if ($("verdict")) $("verdict").textContent = data.sentences.join(" ");
    filled($("task"), data.tasks.map((task, at) => [at, task.name]), state.task, (value) => { choose([]); state.picked = -1; setTask(Number(value)); refresh(); write(); }); // at once: the next click may lead to another page
    const colours = Object.keys(COLUMNS).filter(hasAny);
    if (!colours.includes(state.colour)) state.colour = ["class", "drift"].find((key) => colours.includes(key)) ?? colours[0];
    filled($("colour"), colours.map((key) => [key, COLUMNS[key].title]), state.colour, setColour);
    filled($("repair"), repairs.map((name, at) => [at, data.stages.find((stage) => stage.name === name)?.title ?? name]), state.repair, (value) => { state.repair = Number(value); refilter(); recolour(); refresh(); });
    $("repair-label").hidden = repairs.length < 2;
    filled($("sort"), Object.keys(SORTS).map((key) => [key, key]), state.sort, (value) => { state.sort = value; state.page = 0; refresh(); });
    const bound = (id, key, act) => { $(id).value = state[key]; $(id).addEventListener(id === "search" ? "input" : "change", () => { state[key] = $(id).value; act(); refresh(); }); };
    bound("panels", "panels", () => { layOut(); refilter(); recolour(); });
    bound("search", "search", refilter);
    bound("as", "as", () => {});
    $("panels").options[3].hidden = data.tasks.length < 2;
    if (hosted) root.style.setProperty("--map", `${Math.max(560, hosted.high)}px`);
    $("drawer-button").onclick = () => {
      const isClosed = document.querySelector("main").classList.toggle("closed");
      $("drawer-button").textContent = isClosed ? "Show cards" : "Hide cards";
      $("drawer-button").setAttribute("aria-expanded", String(!isClosed));
    };
    $("names").checked = state.names;
    $("names").onchange = () => { state.names = $("names").checked; redraw(); };
    Object.assign($("stage"), { max: S - 1, value: state.stage, oninput: () => { playing = null; state.stage = Number($("stage").value); for (const panel of panels) panel.place(); showStage(); redraw(); } });
    $("stops").replaceChildren(...data.stages.map((stage, at) => { const stop = button(stage.title, `stop role-${stage.role}`, () => goTo(at), at === stageAt()); return stop; }));
    $("play").onclick = () => { if (playing) { playing = null; showStage(); refresh(); } else { if (state.stage >= S - 1) state.stage = 0; goTo(S - 1); } };
    Object.assign($("layer"), { max: Math.max(0, L - 1), value: state.layer, oninput: () => { state.layer = Number($("layer").value); layOut(); refilter(); recolour(); refresh(); } });
    $("layer").closest("label").hidden = L < 2;
    for (const radio of $("drag").querySelectorAll("input")) radio.onchange = () => { state.drag = radio.value; };
    $("closer").onclick = () => zoom(1.4);
    $("farther").onclick = () => zoom(1 / 1.4);
    $("whole").onclick = () => { Object.assign(view, { k: 1, x: 0, y: 0 }); redraw(); };
    $("contours").checked = state.contours;
    $("contours").onchange = () => { state.contours = $("contours").checked; redraw(); };
    $("clear").onclick = () => choose([]);
    $("back").onclick = () => { state.page--; refresh(); };
    $("on").onclick = () => { state.page++; refresh(); };
    $("notes").replaceChildren(...data.notes.map((text) => {
      const said = made("p");
      said.append(...text.split("`").map((part, at) => (at % 2 ? made("code", "", part) : part)));
      return said;
    }));
    const repaint = () => { readTheme(); recolour(); refresh(); };
    const tellHeight = () => { if (hosted) tell({ height: document.body.offsetHeight }); };
    if (hosted) {
      addEventListener("message", ({ source, data: said }) => { if (source === parent && typeof said?.dark === "boolean") { const task = NAMES.task.indexOf(said.task); if (task >= 0) setTask(task); setTheme(said.dark); repaint(); tellHeight(); } });
      new ResizeObserver(tellHeight).observe(document.body);
    } else addEventListener("hashchange", () => location.reload());
    scheme.addEventListener("change", repaint);
    new ResizeObserver(redraw).observe($("scatters"));
    layOut(); refilter(); recolour(); showStage(); refresh();
    tellHeight(); // a frame that is out of sight observes nothing before it is scrolled to, and would push away what lies below
  };
  // For tests and benchmarks: what is where, and how many frames were drawn.
  const explorer = {
    frames: 0, separating: () => separating(within()), stride: () => stride, labels: (at = 0) => panels[at].labels, stages: S, panels: () => panels, state, goTo, choose, setColour,
    selected: () => within().map((i) => data.ids[i]),
    places: (at = 0) => { const panel = panels[at], box = panel.canvas.getBoundingClientRect(); return Array.from({ length: panel.n }, (_, i) => { const [x, y] = panel.screen(i); return [data.ids[panel.start + i], box.left + x / panel.dpr, box.top + y / panel.dpr]; }); },
  };
  window.explorer = explorer;
  start();
})();
