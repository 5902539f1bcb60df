"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const views = [];
  const failed = (error) => console.error(error);
  for (const [id, spec] of Object.entries(charts)) {
    // ast: expressions are interpreted, not compiled, so that the page's policy can forbid eval.
    vegaEmbed("#" + id, spec, { mode: "vega-lite", actions: false, renderer: "svg", ast: true, tooltip: { theme: "page" } })
      .then((result) => views.push(result.view))
      .catch(failed);
  }
  const buttons = [...document.querySelectorAll(".legend button")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const chosen = button.getAttribute("aria-pressed") === "true" ? "" : button.dataset.id;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other.dataset.id === chosen));
      for (const view of views) view.signal("focus", chosen).runAsync().catch(failed);
    });
  }
})();
