// The page: one card an activation, the comparison of two, the search.
let colours = palette();

const bounded = (value, low, high) => Math.min(Math.max(value, low), high);
const later = (draw) => {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  };
};

/** f or its slope (order 1) of one scalar, with the values that its parameters have now. */
function bind(half, values, order = 0) {
  const f = FUNCTIONS[half.f][order], given = half.parameters.map((name) => values[name]);
  return (x) => f(x, ...given);
}

/** One slider a parameter; `changed` is called whenever one moves. Returns the values, kept up to date. */
function watchSliders(root, changed) {
  const values = {};
  for (const input of root.querySelectorAll("input[type=range][data-name]")) {
    const output = input.parentElement.querySelector("output");
    const read = () => {
      values[input.dataset.name] = Number(input.value);
      output.textContent = shown(values[input.dataset.name]);
    };
    input.addEventListener("input", () => { read(); changed(); });
    read();
  }
  return values;
}

/** Buttons that halve and double the window, from a quarter to eight times of what it was. */
function watchZoom(root, changed) {
  const state = { zoom: 1 };
  for (const button of root.querySelectorAll("button[data-zoom]"))
    button.addEventListener("click", () => {
      state.zoom = bounded(state.zoom * Number(button.dataset.zoom), 0.25, 8);
      changed();
    });
  return state;
}

/** Makes a box answer the pointer and the arrow keys with a point inside its plot; `tell` gets null when it leaves. */
function watchPoint(box, plot, flat, tell) {
  let point = null;
  const go = (next) => {
    point = next;
    if (plot()) tell(point);
  };
  box.addEventListener("pointermove", (event) => {
    const place = box.getBoundingClientRect(), p = plot();
    if (!p) return; // not drawn yet
    const round = (v, range) => Number(v.toFixed(bounded(2 - Math.floor(Math.log10((range[1] - range[0]) / 4)), 0, 8)));
    const x = bounded(round(p.back(event.clientX - place.left), p.x), ...p.x);
    go([x, flat ? 0 : bounded(round(p.backY(event.clientY - place.top), p.y), ...p.y)]);
  });
  box.addEventListener("pointerleave", () => { if (document.activeElement !== box) go(null); });
  box.addEventListener("blur", () => go(null));
  box.addEventListener("focus", () => { if (point === null && box.matches(":focus-visible")) go([0, 0]); });
  box.addEventListener("keydown", (event) => {
    const p = plot(), [x, y] = point ?? [0, 0];
    if (!p) return;
    const [dx, dy] = [p.x, p.y].map((r) => (r[1] - r[0]) / (event.shiftKey ? 240 : 60));
    const moves = { ArrowLeft: [-dx, 0], ArrowRight: [dx, 0], Home: [-Infinity, 0], End: [Infinity, 0] };
    Object.assign(moves, flat ? { ArrowDown: [-dx, 0], ArrowUp: [dx, 0] } : { ArrowDown: [0, -dy], ArrowUp: [0, dy] });
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    const clean = (v) => Number(v.toPrecision(12));
    go([clean(bounded(x + move[0], ...p.x)), clean(bounded(y + move[1], ...p.y))]);
  });
}

function dot(plot, x, y, look) {
  if (y === y) add(plot.cursor, "circle", { cx: plot.sx(x), cy: plot.sy(bounded(y, ...plot.y)), r: 4, class: look });
}

/** Begins the cursor anew: a line at x, across and down where y is given too. */
function cursor(plot, x, y = null) {
  plot.cursor?.remove();
  plot.cursor = add(plot.svg, "g", { class: "cursor" });
  if (x === null) return;
  add(plot.cursor, "path", { d: `M${plot.sx(x)} ${plot.top}V${plot.bottom}` });
  if (y !== null) add(plot.cursor, "path", { d: `M${plot.left} ${plot.sy(y)}H${plot.right}` });
}

/** Writes numbers into the outputs of a readout, by their data-of. */
function tellReadout(root, values) {
  for (const output of root.querySelectorAll(".readout output")) {
    const value = values?.[output.dataset.of];
    output.textContent = value === undefined ? "" : `= ${shown(value)}`;
  }
}

function scalarCard(root, entry) {
  const box = root.querySelector(".chart"), half = entry.halves[0];
  let plot, point = null;
  const draw = () => {
    const reach = entry.reach[0] * zoom.zoom;
    const curves = [{ f: bind(half, values), look: "a" }, { f: bind(half, values, 1), look: "b" }];
    plot = drawCurves(box, entry.key, curves, [-reach, reach], reach, ["x"]);
    tell(point);
  };
  const tell = (next) => {
    point = next;
    const x = point && point[0];
    cursor(plot, x);
    if (x === null) { tellReadout(root, null); box.removeAttribute("aria-valuetext"); return; }
    const [y, slope] = [bind(half, values)(x), bind(half, values, 1)(x)];
    dot(plot, x, slope, "b");
    dot(plot, x, y, "a");
    tellReadout(root, { x, f: y, d: slope });
    box.setAttribute("aria-valuenow", x);
    box.setAttribute("aria-valuetext", `x ${shown(x)}, f ${shown(y)}, slope ${shown(slope)}`);
  };
  const redraw = later(draw), values = watchSliders(root, redraw), zoom = watchZoom(root, redraw);
  watchPoint(box, () => plot, true, (next) => tell(next));
  return { draw };
}

function gateCard(root, entry) {
  const box = root.querySelector(".chart");
  let plot, point = null;
  const draw = () => {
    const [g, u] = entry.reach.map((r) => [-r * zoom.zoom, r * zoom.zoom]);
    const [phi, psi] = entry.halves.map((half) => bind(half, values));
    plot = drawMap(box, entry.key, phi, psi, g, u, colours);
    tell(point);
  };
  const tell = (next) => {
    point = next;
    cursor(plot, point && point[0], point && point[1]);
    if (!point) { tellReadout(root, null); return; }
    const both = (half, x) => [0, 1].map((order) => bind(half, values, order)(x));
    const [[f, df], [p, dp]] = entry.halves.map((half, i) => both(half, point[i]));
    tellReadout(root, { g: point[0], u: point[1], h: f * p, dg: df * p, du: f * dp });
    dot(plot, ...point, "c");
  };
  const redraw = later(draw), values = watchSliders(root, redraw), zoom = watchZoom(root, redraw);
  watchPoint(box, () => plot, false, (next) => tell(next));
  return { draw };
}

/** The small picture in the index. */
function thumbnail(link, entry) {
  const [svg, canvas] = [link.querySelector("svg"), link.querySelector("canvas")];
  const [f, psi] = entry.halves.map((half) => bind(half, entry.values));
  if (canvas) {
    const [g, u] = entry.reach.map((r) => [-r, r]);
    return () => paintMap(canvas, f, psi, g, u, 84, colours);
  }
  const reach = entry.reach[0], [width, height] = [96, 60];
  const points = sampled(f, -reach, reach, width), values = points.filter(Boolean).map((point) => point[1]);
  const y = [Math.max(-0.7 * reach, Math.min(0, ...values)), Math.min(0.7 * reach, Math.max(0, ...values))];
  const pad = 0.1 * (y[1] - y[0]);
  const plot = { sx: (v) => (width * (v + reach)) / (2 * reach), y: [y[0] - pad, y[1] + pad] };
  plot.sy = (v) => height - (height * (v - plot.y[0])) / (plot.y[1] - plot.y[0]);
  return () => {
    svg.replaceChildren();
    add(svg, "path", { d: `M0 ${plot.sy(0)}H${width}M${width / 2} 0V${height}`, class: "zero" });
    const slope = sampled(bind(entry.halves[0], entry.values, 1), -reach, reach, width);
    add(svg, "path", { d: path(slope, plot), class: "b" });
    add(svg, "path", { d: path(points, plot), class: "a" });
  };
}

/** The key to the maps' colours. */
function drawScale(root) {
  const bands = [...colours[0].slice().reverse(), ...colours[1]];
  const ends = [...LEVELS.slice().reverse().map((v) => -v), 0, ...LEVELS, NaN];
  root.replaceChildren(...bands.map((colour, i) => {
    const part = document.createElement("span");
    part.style.borderTopColor = `rgb(${colour.join()})`;
    const level = document.createElement("i");
    level.textContent = ends[i] === ends[i] ? shown(ends[i]) : "";
    part.append(level);
    return part;
  }));
}

function search() {
  const [input, count] = [document.getElementById("search"), document.getElementById("count")];
  const shownBy = document.querySelectorAll("[data-words]"), total = DATA.entries.length;
  const filter = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const part of shownBy) {
      part.hidden = !words.every((word) => part.dataset.words.includes(word));
      if (part.matches("article") && !part.hidden) found++;
    }
    const some = found === 0 ? "nothing found" : `${found} of ${total}`;
    count.textContent = found === total ? `${total} activations` : some;
  };
  input.addEventListener("input", filter);
  // A link to a hidden card shows all cards again.
  addEventListener("hashchange", () => {
    if (!document.getElementById(location.hash.slice(1))?.hidden) return;
    input.value = "";
    filter();
    document.getElementById(location.hash.slice(1)).scrollIntoView();
  });
  filter();
}

/** Draws the pictures in turn, in slices that leave the page free to answer; a new call takes over from an old one. */
function drawing(pictures) {
  let latest = 0;
  return () => {
    const mine = ++latest;
    let next = 0;
    measure();
    colours = palette();
    const some = () => {
      const end = performance.now() + 12;
      while (mine === latest && next < pictures.length && performance.now() < end) pictures[next++].draw();
      if (mine === latest && next < pictures.length) setTimeout(some);
    };
    some();
  };
}

function start() {
  const card = (entry) => (entry.kind === "scalar" ? scalarCard : gateCard)(document.getElementById(entry.key), entry);
  const place = (entry) => document.querySelector(`.index a[data-key="${entry.key}"]`);
  const all = drawing([
    ...DATA.entries.map((entry) => ({ draw: thumbnail(place(entry), entry) })),
    comparison(document.getElementById("compare-tool")),
    { draw: () => drawScale(document.querySelector(".scale")) },
    ...DATA.entries.map(card),
  ]);
  let width = document.body.clientWidth;
  addEventListener("resize", later(() => {
    if (document.body.clientWidth === width) return; // on a phone the address bar comes and goes
    width = document.body.clientWidth;
    all();
  }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  search();
  all();
}

start();
