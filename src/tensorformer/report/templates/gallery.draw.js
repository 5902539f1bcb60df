// Drawing: axes and curves as SVG, maps of two variables as a canvas with contours over it.
const SVG = "http://www.w3.org/2000/svg";
const DATA = JSON.parse(document.getElementById("entries").textContent);
const LEVELS = DATA.levels;
const HEIGHT = 270; // of curves, as in the style sheet
const MARGIN = { left: 38, right: 10, top: 8, bottom: 24 };

function add(parent, name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  parent.append(made);
  return made;
}

/** A number as a reader meets it: a proper minus, no trailing zeros. */
function shown(value, digits = 5) {
  if (value !== value) return "not a number";
  if (Math.abs(value) === Infinity) return value > 0 ? "∞" : "−∞";
  const [mantissa, exponent] = String(Number(value.toPrecision(digits))).split("e");
  return (exponent ? `${mantissa}·10^${Number(exponent)}` : mantissa).replaceAll("-", "−");
}

// Measured together before anything is drawn: asking between two drawings lays the whole page out again.
const widths = new Map();
const measure = () => document.querySelectorAll(".chart").forEach((box) => widths.set(box, box.clientWidth));
const widthOf = (box) => Math.max(200, widths.get(box));

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(k * step);
  return found;
}

/** Empties the box and draws axes in it; returns the scales and the group, cut to the frame, for what is drawn. */
function frame(box, x, y, height, unique, titles) {
  box.querySelectorAll("svg").forEach((old) => old.remove());
  const width = widthOf(box);
  const svg = add(box, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const steps = [ticks(...x, width / 60), ticks(...y, height / 45)];
  const longest = Math.max(...steps[1].map((v) => shown(v).length));
  const [left, right] = [Math.max(MARGIN.left, 6.6 * longest + 12), width - MARGIN.right];
  const [top, bottom] = [MARGIN.top, height - MARGIN.bottom];
  const sx = (v) => left + ((v - x[0]) / (x[1] - x[0])) * (right - left);
  const sy = (v) => bottom - ((v - y[0]) / (y[1] - y[0])) * (bottom - top);
  const back = (px) => x[0] + ((px - left) / (right - left)) * (x[1] - x[0]);
  const backY = (py) => y[0] + ((bottom - py) / (bottom - top)) * (y[1] - y[0]);
  const clip = add(add(svg, "clipPath", { id: `cut-${unique}` }), "rect");
  for (const [key, value] of Object.entries({ x: left, y: top, width: right - left, height: bottom - top }))
    clip.setAttribute(key, value);
  const lines = add(svg, "g", { class: "grid" });
  const words = add(svg, "g", { class: "ticks" });
  for (const v of steps[0]) {
    add(lines, "path", { d: `M${sx(v)} ${top}V${bottom}`, class: v === 0 ? "zero" : "" });
    add(words, "text", { x: sx(v), y: bottom + 16, "text-anchor": "middle" }, shown(v));
  }
  for (const v of steps[1]) {
    add(lines, "path", { d: `M${left} ${sy(v)}H${right}`, class: v === 0 ? "zero" : "" });
    add(words, "text", { x: left - 6, y: sy(v) + 4, "text-anchor": "end" }, shown(v));
  }
  add(words, "text", { x: right, y: bottom - 6, "text-anchor": "end", class: "axis" }, titles[0]);
  if (titles[1]) add(words, "text", { x: left + 7, y: top + 13, class: "axis" }, titles[1]);
  const marks = add(svg, "g", { class: "role-mark", "clip-path": `url(#cut-${unique})` });
  const over = add(svg, "g", { class: "over" });
  return { svg, marks, over, sx, sy, back, backY, left, right, top, bottom, x, y };
}

/** The points of a curve, one a pixel; null where it jumps. */
function sampled(f, low, high, n) {
  const found = [];
  let before = null;
  for (let i = 0; i <= n; i++) {
    const x = low + ((high - low) * i) / n, y = f(x);
    if (before && Math.abs(y - before[1]) > (0.05 * (high - low)) && jumps(f, before[0], x)) found.push(null);
    found.push([x, y]);
    before = [x, y];
  }
  return found;
}

function jumps(f, low, high) {
  const whole = Math.abs(f(high) - f(low));
  for (let k = 0; k < 30; k++) {
    const middle = (low + high) / 2;
    if (Math.abs(f(middle) - f(low)) > Math.abs(f(high) - f(middle))) high = middle;
    else low = middle;
  }
  return Math.abs(f(high) - f(low)) > 0.5 * whole;
}

function path(points, plot) {
  const [low, high] = [plot.y[0] - (plot.y[1] - plot.y[0]), plot.y[1] + (plot.y[1] - plot.y[0])];
  let text = "", pen = "M";
  for (const point of points) {
    if (point === null || point[1] !== point[1]) { pen = "M"; continue; }
    const y = Math.min(Math.max(point[1], low), high);
    text += `${pen}${plot.sx(point[0]).toFixed(1)} ${plot.sy(y).toFixed(2)}`;
    pen = "L";
  }
  return text;
}

/** Draws curves over one window; each is {f, look}, look a CSS class. `most` bounds what is shown of the y axis. */
function drawCurves(box, unique, curves, [low, high], most, titles) {
  const n = 2 * Math.ceil(widthOf(box) / 2);
  const points = curves.map((curve) => sampled(curve.f, low, high, n));
  const values = points.flat().filter((p) => p && Math.abs(p[1]) < Infinity).map((p) => p[1]);
  let [bottom, top] = [Math.max(-most, Math.min(0, ...values)), Math.min(most, Math.max(0, ...values))];
  if (!(top > bottom)) [bottom, top] = [-1, 1];
  const pad = 0.06 * (top - bottom);
  const plot = frame(box, [low, high], [bottom - pad, top + pad], HEIGHT, unique, titles);
  curves.forEach((curve, i) => add(plot.marks, "path", { d: path(points[i], plot), class: curve.look }));
  return plot;
}

function rgb(name) {
  const text = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16));
}

/** Colours of the bands between levels: [negative, positive], each from paper to full. */
function palette() {
  const paper = rgb("page");
  return ["series-2", "series-1"].map((name) => {
    const full = rgb(name);
    return [...LEVELS, 0].map((_, i) => {
      const t = (i + 0.5) / (LEVELS.length + 0.2);
      return paper.map((c, k) => Math.round(c + (full[k] - c) * Math.min(1, t)));
    });
  });
}

function band(h) {
  const size = Math.abs(h);
  let i = 0;
  while (i < LEVELS.length && size >= LEVELS[i]) i++;
  return i;
}

/** Fills a canvas with the bands of φ(g)·ψ(u), g to the right and u upwards. */
function paintMap(canvas, phi, psi, g, u, n, colours) {
  canvas.width = canvas.height = n;
  const context = canvas.getContext("2d");
  const image = context.createImageData(n, n), pixels = new Uint32Array(image.data.buffer);
  const packed = colours.map((side) => side.map(([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r));
  const at = (range, i) => range[0] + ((range[1] - range[0]) * (i + 0.5)) / n;
  const left = Float64Array.from({ length: n }, (_, i) => phi(at(g, i)));
  for (let row = 0; row < n; row++) {
    const value = psi(at(u, n - 1 - row));
    for (let column = 0; column < n; column++) {
      const h = left[column] * value;
      if (h > 0) pixels[row * n + column] = packed[1][band(h)];
      else if (h < 0) pixels[row * n + column] = packed[0][band(h)];
      // Exactly zero is paper.
    }
  }
  context.putImageData(image, 0, 0);
}

/** The contours of φ·ψ at all levels as path text, by marching squares: each cell by its four corners. */
function contours(a, b, px, py) {
  const level = (k) => Math.sign(k) * LEVELS[Math.abs(k) - 1];
  const bands = a.map((left) => Int8Array.from(b, (right) => Math.sign(left * right) * band(left * right)));
  let text = "";
  for (let i = 0; i + 1 < a.length; i++) {
    const [here, next] = [bands[i], bands[i + 1]];
    for (let j = 0; j + 1 < b.length; j++) {
      if (here[j] === next[j] && here[j] === here[j + 1] && here[j] === next[j + 1]) continue;
      const corners = [here[j], next[j], next[j + 1], here[j + 1]];
      const [low, high] = [Math.min(...corners), Math.max(...corners)];
      const h = [a[i] * b[j], a[i + 1] * b[j], a[i + 1] * b[j + 1], a[i] * b[j + 1]];
      for (let k = low; k <= high; k++) {
        // A band begins at its level on the side away from zero.
        if (k === 0 || (k > 0 ? k === low : k === high)) continue;
        const found = crossings(h, level(k));
        for (let m = 0; m + 1 < found.length; m += 2) {
          const [p, q] = [0, 1].map((end) => found[m + end]).map((c) => [px(i + c[0]), py(j + c[1])]);
          text += `M${p.map((v) => v.toFixed(1)).join(" ")}L${q.map((v) => v.toFixed(1)).join(" ")}`;
        }
      }
    }
  }
  return text;
}

const CORNERS = [[0, 0], [1, 0], [1, 1], [0, 1]];

/** Where a level crosses the sides of a unit cell with these values at its corners. */
function crossings(h, level) {
  const found = [];
  for (let k = 0; k < 4; k++) {
    const m = (k + 1) % 4, [p, q] = [h[k] - level, h[m] - level];
    if (p > 0 === q > 0) continue;
    const t = p / (p - q);
    found.push([0, 1].map((c) => CORNERS[k][c] + t * (CORNERS[m][c] - CORNERS[k][c])));
  }
  return found;
}

/** Draws a gate over a window: bands, contours, and the level beside some of them. */
function drawMap(box, unique, phi, psi, g, u, colours) {
  const plot = frame(box, g, u, widthOf(box), unique, ["g", "u"]);
  const canvas = box.querySelector("canvas");
  paintMap(canvas, phi, psi, g, u, 200, colours);
  const place = { left: plot.left, top: plot.top, width: plot.right - plot.left, height: plot.bottom - plot.top };
  for (const [key, value] of Object.entries(place)) canvas.style[key] = `${value}px`;
  const n = 100;
  const at = (range, i) => range[0] + ((range[1] - range[0]) * i) / n;
  const a = Array.from({ length: n + 1 }, (_, i) => phi(at(g, i)));
  const b = Array.from({ length: n + 1 }, (_, i) => psi(at(u, i)));
  const d = contours(a, b, (i) => plot.sx(at(g, i)), (j) => plot.sy(at(u, j)));
  add(plot.marks, "path", { d, class: "level" });
  for (const side of [1, -1]) label(plot, phi, psi, side);
  return plot;
}

/** Writes the levels that the diagonal from the origin to a right-hand corner crosses, where there is room. */
function label(plot, phi, psi, side) {
  const [far, high] = [plot.x[1], side > 0 ? plot.y[1] : plot.y[0]];
  let before = 0, last = -Infinity;
  for (let i = 1; i <= 400; i++) {
    const t = i / 410, h = phi(t * far) * psi(t * high), now = band(h);
    const room = (t - last) * (plot.right - plot.left) > 44;
    if (now > before && room && t > 0.1 && t < 0.95) {
      const text = shown(Math.sign(h) * LEVELS[now - 1]);
      add(plot.over, "text", { x: plot.sx(t * far), y: plot.sy(t * high) + 4, class: "value" }, text);
      last = t;
    }
    before = now;
  }
}
