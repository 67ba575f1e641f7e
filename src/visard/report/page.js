// Draws the charts that the page carries as JSON, in the colours of the current theme.
(function () {
  "use strict";
  const root = document.documentElement;
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const chosen = {};
  const touch = window.matchMedia("(pointer: coarse), (hover: none)").matches;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let printing = false;

  const css = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

  // "@blue/20" -> the theme's blue at 20 % opacity. Only values of colour keys are looked up: names stay names.
  function colour(token) {
    const [name, percent] = token.slice(1).split("/");
    const hex = css(name);
    if (!percent) return hex;
    const part = (i) => parseInt(hex.slice(i, i + 2), 16);
    return `rgba(${part(1)},${part(3)},${part(5)},${Number(percent) / 100})`;
  }

  function resolve(value, key) {
    if (Array.isArray(value)) return value.map((item) => resolve(item, key));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, resolve(v, k)]));
    return typeof value === "string" && value[0] === "@" && /color$/i.test(key) ? colour(value) : value;
  }

  const axis = {
    gridcolor: "@grid", linecolor: "@axis", zeroline: false, automargin: true, ticks: "", fixedrange: touch,
    tickfont: { color: "@muted", size: 12 }, tickcolor: "@axis",
  };

  function layoutOf(layout, narrow) {
    const full = {
      font: { family: css("sans"), size: 12.5, color: "@ink" },
      paper_bgcolor: "@panel", plot_bgcolor: "@panel",
      margin: { l: 8, r: narrow ? 8 : 16, t: 22, b: 8 },
      dragmode: touch ? false : "zoom",
      hoverlabel: { bgcolor: "@panel", bordercolor: "@line", font: { color: "@ink", size: 12.5 }, namelength: 48 },
      legend: {
        orientation: "h", x: 0, y: 1.06, xanchor: "left", yanchor: "bottom", traceorder: "normal",
        font: { color: "@ink", size: 12 }, itemclick: "toggle",
      },
      ...layout,
    };
    for (const name of new Set(["xaxis", "yaxis", ...Object.keys(layout).filter((k) => /^[xy]axis/.test(k))])) {
      const own = layout[name] || {};
      const title = own.title ? { standoff: 8, font: { color: "@muted", size: 12 }, ...own.title } : undefined;
      full[name] = { ...axis, showgrid: name[0] === "y", ...own, title };
      // Labels such as 0.001 % would touch one another there: every second one, up to the last.
      if (narrow && name[0] === "x" && own.type === "log" && own.ticktext.length > 4)
        full[name].ticktext = own.ticktext.map((text, i) => ((own.ticktext.length - 1 - i) % 2 ? "" : text));
    }
    return resolve(full, "");
  }

  const config = { responsive: true, displayModeBar: false, scrollZoom: false };

  function draw(chart, width) {
    const place = document.getElementById("chart-" + chart.id);
    const figure = chart.figures[chosen[chart.id] || 0];
    const layout = layoutOf(figure.layout, place.clientWidth < 480);
    if (width) layout.width = width;
    // In a narrow window the legend has one name a line.
    const names = figure.data.filter((trace) => trace.showlegend !== false).length;
    const narrow = place.clientWidth < 480 && figure.layout.showlegend;
    layout.height = chart.height + (narrow ? 17 * Math.max(0, names - 2) : 0);
    place.style.height = layout.height + "px";
    return Plotly.react(place, resolve(figure.data, ""), layout, config);
  }

  const drawAll = (width) => Promise.all(charts.map((chart) => draw(chart, width)));

  // The first charts at once, the others one by one, so that the page answers while it draws.
  function drawInTurn(i) {
    if (i >= charts.length) {
      root.dataset.drawn = "all";
      return;
    }
    draw(charts[i]);
    if (i < 2) drawInTurn(i + 1);
    else setTimeout(() => drawInTurn(i + 1), 0);
  }

  function remembered() {
    try { return localStorage.getItem("visard-theme"); } catch { return null; }
  }

  function setTheme(theme, remember) {
    root.dataset.theme = theme;
    document.getElementById("theme").setAttribute("aria-pressed", String(theme === "dark"));
    if (remember) try { localStorage.setItem("visard-theme", theme); } catch { /* a page without storage forgets */ }
  }

  const saved = remembered();
  setTheme(saved === "dark" || saved === "light" ? saved : dark.matches ? "dark" : "light", false);
  document.getElementById("theme").addEventListener("click", () => {
    setTheme(root.dataset.theme === "dark" ? "light" : "dark", true);
    drawAll();
  });
  dark.addEventListener("change", (event) => {
    if (printing || remembered()) return;
    setTheme(event.matches ? "dark" : "light", false);
    drawAll();
  });

  for (const select of document.querySelectorAll("select[data-chart]"))
    select.addEventListener("change", () => {
      const chart = charts.find((c) => c.id === select.dataset.chart);
      chosen[chart.id] = Number(select.value);
      const place = document.getElementById("chart-" + chart.id);
      const note = place.closest("figure").querySelector(".note");
      place.setAttribute("aria-label", chart.figures[chosen[chart.id]].alt);
      if (note) note.textContent = chart.figures[chosen[chart.id]].note;
      draw(chart);
    });

  for (const button of document.querySelectorAll("button[data-save]"))
    button.addEventListener("click", () => {
      const place = document.getElementById("chart-" + button.dataset.save);
      const size = { width: place.clientWidth, height: place.clientHeight, scale: 2 };
      Plotly.downloadImage(place, { format: "png", filename: button.dataset.save, ...size });
    });

  // Explanations: hovering and focus show them (style sheet); a tap toggles, Escape hides.
  const asks = [...document.querySelectorAll(".ask")];
  const close = (except) => asks.forEach((ask) => ask !== except && ask.classList.remove("open"));
  for (const ask of asks)
    ask.addEventListener("click", () => { close(ask); ask.classList.toggle("open"); });
  document.addEventListener("click", (event) => { if (!event.target.closest(".ask")) close(); });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    close();
    if (document.activeElement && document.activeElement.classList.contains("ask")) document.activeElement.blur();
  });

  // On paper: light, everything drawn and unfolded, charts as wide as the paper.
  let before = null;
  window.addEventListener("beforeprint", () => {
    if (printing) return;
    printing = true;
    before = { theme: root.dataset.theme, closed: [...document.querySelectorAll("details:not([open])")] };
    root.dataset.theme = "light";
    root.classList.add("print");
    before.closed.forEach((fold) => { fold.open = true; });
    drawAll(640);
  });
  window.addEventListener("afterprint", () => {
    if (!printing) return;
    printing = false;
    root.dataset.theme = before.theme;
    root.classList.remove("print");
    before.closed.forEach((fold) => { fold.open = false; });
    drawAll();
  });

  drawInTurn(0);
})();
