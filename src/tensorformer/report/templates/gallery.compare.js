// Two activations and their difference.

/** The largest |f| over a window: the best of a grid, then a search between its neighbours. */
function largest(f, [low, high]) {
  const n = 2000, step = (high - low) / n;
  let at = low, most = -1;
  for (let i = 0; i <= n; i++) {
    const x = low + i * step, size = Math.abs(f(x));
    if (size > most * (1 + 1e-9)) [at, most] = [x, size];
  }
  let [a, b] = [Math.max(low, at - step), Math.min(high, at + step)];
  for (let k = 0; k < 80; k++) {
    const [c, d] = [b - (b - a) / 1.618033988749895, a + (b - a) / 1.618033988749895];
    if (Math.abs(f(c)) < Math.abs(f(d))) a = c;
    else b = d;
  }
  const x = (a + b) / 2;
  return Math.abs(f(x)) >= most ? { x, size: Math.abs(f(x)) } : { x: at, size: most };
}

function comparison(root) {
  const [first, second] = root.querySelectorAll("select");
  const [both, gap] = root.querySelectorAll(".chart");
  const [answer, slots, slice] = [".result", ".given", ".slice"].map((part) => root.querySelector(part));
  const byKey = Object.fromEntries(DATA.entries.map((entry) => [entry.key, entry]));
  let plots = [], point = null, pair, values = {};

  const along = () => (slice.querySelector("input:checked").value === "g" ? 0 : 1);
  const curve = (entry) => {
    if (entry.halves.length === 1) return bind(entry.halves[0], values);
    const moving = bind(entry.halves[along()], values);
    const factor = bind(entry.halves[1 - along()], values)(still.at);
    return (x) => moving(x) * factor;
  };
  const draw = () => {
    const variable = pair[0].halves.length === 1 ? "x" : ["g", "u"][along()];
    const reach = zoom.zoom * Math.max(...pair.map((entry) => entry.reach[entry.halves.length === 1 ? 0 : along()]));
    const [f, g] = pair.map(curve), less = (x) => f(x) - g(x), window = [-reach, reach];
    const most = Math.max(1, reach * (pair[0].halves.length === 1 ? 1 : Math.abs(still.at) + 1));
    plots = [
      drawCurves(both, "both", [{ f, look: "a" }, { f: g, look: "b" }], window, most, [variable]),
      drawCurves(gap, "gap", [{ f: less, look: "c" }], window, Infinity, [variable]),
    ];
    const found = largest(less, window);
    const mirrored = Math.abs(Math.abs(less(-found.x)) - found.size) <= 1e-9 * found.size && found.x !== 0;
    const edge = Math.abs(found.x) > reach * (1 - 1e-9) ? ", the edge of the window" : "";
    const where = `${mirrored ? "±" : ""}${shown(mirrored ? Math.abs(found.x) : found.x)}`;
    answer.textContent = found.size === 0 ? "No difference in this window."
      : `Largest difference ${shown(found.size, 4)} at ${variable} = ${where}${edge}.`;
    const names = pair.map((entry) => entry.name);
    both.setAttribute("aria-label", `${names[0]} and ${names[1]} along ${variable}; arrow keys read values`);
    gap.setAttribute("aria-label", `${names[0]} less ${names[1]} along ${variable}. ${answer.textContent}`);
    root.querySelectorAll("[data-name-of]").forEach((e) => { e.textContent = names[e.dataset.nameOf]; });
    root.querySelectorAll("[data-variable]").forEach((e) => { e.textContent = variable; });
    slice.querySelector("[data-other]").textContent = ["u", "g"][along()];
    tell(point);
  };
  const tell = (next) => {
    point = next;
    plots.forEach((plot) => cursor(plot, point && point[0]));
    if (!point) { tellReadout(root, null); return; }
    const x = point[0], [y, z] = pair.map((entry) => curve(entry)(x));
    dot(plots[0], x, z, "b");
    dot(plots[0], x, y, "a");
    dot(plots[1], x, y - z, "c");
    tellReadout(root, { x, a: y, b: z, c: y - z });
    for (const box of [both, gap]) {
      box.setAttribute("aria-valuenow", x);
      box.setAttribute("aria-valuetext", `at ${shown(x)}: ${shown(y)} and ${shown(z)}, difference ${shown(y - z)}`);
    }
  };
  const redraw = later(draw), zoom = watchZoom(root, redraw);
  const still = watchSliders(slice, redraw);
  slice.addEventListener("change", redraw);

  /** Takes the chosen pair: the second must be of the kind of the first; parameters of one name share a slider. */
  const choose = () => {
    const a = byKey[first.value];
    let b = byKey[second.value];
    for (const group of second.querySelectorAll("optgroup")) group.disabled = group.dataset.kind !== a.kind;
    if (b.kind !== a.kind) b = DATA.entries.find((entry) => entry.kind === a.kind && entry !== a);
    second.value = b.key;
    pair = [a, b];
    slice.hidden = a.kind !== "gate";
    const places = new Map();
    for (const entry of pair) {
      const own = document.getElementById(entry.key).querySelectorAll(".sliders label");
      own.forEach((label) => {
        const name = label.querySelector("input").dataset.name;
        if (!places.has(name)) places.set(name, label.cloneNode(true));
      });
    }
    for (const label of places.values()) {
      const input = label.querySelector("input");
      input.value = input.defaultValue;
    }
    slots.replaceChildren(...places.values());
    values = watchSliders(slots, redraw);
  };
  const pick = (a, b) => {
    [first.value, second.value] = [a, b];
    choose();
    redraw();
  };
  for (const select of [first, second]) select.addEventListener("change", () => pick(first.value, second.value));
  for (const button of root.querySelectorAll("button[data-pair]"))
    button.addEventListener("click", () => pick(...button.dataset.pair.split(" ")));
  for (const link of document.querySelectorAll("a[data-compare]"))
    link.addEventListener("click", () => pick(link.dataset.compare, second.value));
  for (const box of [both, gap]) watchPoint(box, () => plots[box === both ? 0 : 1], true, tell);
  choose();
  return { draw };
}
