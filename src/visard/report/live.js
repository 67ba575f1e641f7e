// Asks visard watch for the state of the runs every two seconds, and shows what has changed.
(function () {
  "use strict";
  const root = document.documentElement;
  const find = (id) => document.getElementById(id);
  const colours = ["blue", "orange", "green", "pink", "violet", "gold", "sky", "brown"];
  const colour = (i) => `var(--${colours[i % colours.length]})`;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let tag = "", latest = null, width = 0;

  // Elements are built from text nodes only: whatever a run calls itself stays text.
  function make(name, attributes, ...children) {
    const element = document.createElement(name);
    fill(element, attributes, children);
    return element;
  }
  function draw(name, attributes, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    fill(element, attributes, children);
    return element;
  }
  function fill(element, attributes, children) {
    for (const [key, value] of Object.entries(attributes || {}))
      key === "style" ? element.style.cssText = value : element.setAttribute(key, value);
    element.append(...children);
  }

  function card(run, i) {
    const share = run.planned ? Math.min(1, run.done / run.planned) : run.state === "finished" ? 1 : 0;
    const facts = run.facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
    const done = run.planned ? `${run.done} of ${run.planned} rounds` : `${run.done} rounds`;
    const more = run.report ? [make("p", { class: "detail" }, make("a", { href: `report-${i}` }, "Report"))] : [];
    return make("li", { class: "card run", style: `--run: ${colour(i)}` },
      make("h3", {}, make("span", { class: "dot" }), run.name, make("span", { class: `pill ${run.state}` }, run.state)),
      make("p", { class: "value" }, done),
      make("div", { class: "track", role: "progressbar", "aria-valuenow": Math.round(100 * share), "aria-valuemin": 0,
        "aria-valuemax": 100, "aria-label": `${run.name}: ${done}` }, make("div", { style: `width: ${100 * share}%` })),
      make("p", { class: "detail" }, run.words), make("dl", { class: "facts" }, ...facts), ...more);
  }

  // Round numbers for an axis: steps of 1, 2 or 5 times a power of ten.
  function ticks(low, high, most) {
    const rough = (high - low) / most || 1;
    const power = Math.pow(10, Math.floor(Math.log10(rough)));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    const found = [];
    for (let k = Math.ceil(low / step); k * step <= high + step * 1e-9; k++) found.push(k * step);
    return found;
  }
  const shown = (value, percent) =>
    percent ? `${(100 * value).toFixed(1)} %` : value.toLocaleString("en", { maximumSignificantDigits: 4 });

  function plot(label, percent, lines, panelWidth) {
    const W = Math.max(260, panelWidth), H = 220, left = 56, right = 10, top = 10, bottom = 24;
    const xs = lines.flatMap((one) => one.points.map((p) => p[0]));
    const ys = lines.flatMap((one) => one.points.map((p) => p[1]));
    let [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    if (x0 === x1) x1 = x0 + 1;
    const room = (y1 - y0) * 0.06 || Math.abs(y1) * 0.05 || 0.05;
    [y0, y1] = [y0 >= 0 && y0 < room * 3 ? 0 : y0 - room, y1 + room];
    const x = (v) => left + (W - left - right) * (v - x0) / (x1 - x0);
    const y = (v) => H - bottom - (H - top - bottom) * (v - y0) / (y1 - y0);
    const svg = draw("svg", { class: "plot", viewBox: `0 0 ${W} ${H}`, role: "img", preserveAspectRatio: "none",
      "aria-label": lines.map((one) => `${label}, ${one.name}: last ${shown(one.points.at(-1)[1], percent)}`).join("; ") });
    for (const v of ticks(y0, y1, 5))
      svg.append(draw("line", { class: "rule", x1: left, x2: W - right, y1: y(v), y2: y(v) }),
        draw("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, shown(v, percent)));
    for (const v of ticks(x0, x1, Math.max(2, W / 90)).filter(Number.isInteger))
      svg.append(draw("text", { x: x(v), y: H - 6, "text-anchor": "middle" }, String(v)));
    svg.append(draw("line", { class: "zero", x1: left, x2: W - right, y1: H - bottom, y2: H - bottom }));
    for (const one of lines) {
      const path = one.points.map((p, k) => `${k ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
      const [lastX, lastY] = one.points.at(-1);
      svg.append(draw("path", { d: path, style: `stroke: ${one.colour}` }),
        draw("circle", { cx: x(lastX), cy: y(lastY), r: 3.5, style: `fill: ${one.colour}` }));
    }
    const names = lines.map((one) => make("span", {},
      make("i", { class: "dot", style: `--run: ${one.colour}` }), `${one.name}: ${shown(one.points.at(-1)[1], percent)}`));
    return make("figure", { class: "panel" }, make("h3", {}, label), svg, make("div", { class: "legend" }, ...names));
  }

  function curves(runs) {
    const drawn = runs.map((run) => run.curves.filter((curve) => curve.points.length));
    const found = new Map(); // in the order of the run with the most curves: one that was not tested yet has fewer
    for (const curve of [...drawn].sort((a, b) => b.length - a.length).flat())
      if (!found.has(curve.label)) found.set(curve.label, { percent: curve.percent, lines: [] });
    drawn.forEach((list, i) => list.forEach((curve) =>
      found.get(curve.label).lines.push({ name: runs[i].name, points: curve.points, colour: colour(i) })));
    const place = find("plots");
    width = place.clientWidth;
    // What does not change needs no chart.
    const texts = (one, line) => [...new Set(line.points.map((p) => shown(p[1], one.percent)))];
    const same = [...found].filter(([, one]) => one.lines.every((line) => texts(one, line).length === 1) &&
      one.lines.some((line) => line.points.length > 2));
    same.forEach(([label]) => found.delete(label));
    find("same").hidden = same.length === 0;
    find("same").textContent = "The same in every round: " +
      same.map(([label, one]) => `${label} ${[...new Set(one.lines.flatMap((line) => texts(one, line)))].join(" and ")}`).join(", ") + ".";
    const panel = (i) => (width > 820 && (i % 2 || i + 1 < found.size) ? (width - 15) / 2 : width) - 34; // a last one alone is wide
    find("nocurves").hidden = found.size + same.length > 0;
    place.replaceChildren(...[...found].map(([label, one], i) => plot(label, one.percent, one.lines, panel(i))));
  }

  function clients(runs) {
    const several = runs.length > 1;
    const all = runs.flatMap((run) => run.clients.map((one) => [run, one]));
    all.sort((a, b) => (a[1].state === "there") - (b[1].state === "there")); // those in trouble first
    const rows = all.map(([run, one]) => make("tr", {},
      make("th", { scope: "row" }, several ? `${run.name}: ${one.name}` : one.name),
      make("td", {}, make("span", { class: `pill ${one.state === "there" ? "good" : one.state}` },
        one.state === "there" ? "replied" : one.state)),
      make("td", { class: "n" }, one.seconds), make("td", { class: "n" }, String(one.round ?? "–")),
      make("td", { class: "n" }, String(one.problems)), make("td", {}, one.reason)));
    find("noclients").hidden = rows.length > 0;
    find("table").hidden = rows.length === 0;
    find("rows").replaceChildren(...rows);
  }

  function sites(runs) {
    const several = runs.length > 1;
    const rows = runs.flatMap((run) => (run.sites || []).map((one) => make("tr", {},
      make("th", { scope: "row" }, several ? `${run.name}: ${one.name}` : one.name),
      make("td", {}, make("span", { class: `pill ${one.state === "connected" ? "good" : one.state}` }, one.state)),
      make("td", { class: "names" }, one.roles), make("td", { class: "n" }, one.seen), make("td", { class: "n" }, String(one.round ?? "–")),
      make("td", {}, one.version), make("td", {}, one.reason))));
    find("sites").hidden = find("tosites").hidden = rows.length === 0;
    find("siterows").replaceChildren(...rows);
  }

  function messages(runs) {
    const several = runs.length > 1;
    const lines = runs.flatMap((run) => run.messages.map((text) => make("li", {}, several ? `${run.name}: ${text}` : text)));
    find("nomessages").hidden = lines.length > 0;
    find("said").hidden = lines.length === 0;
    find("lines").replaceChildren(...lines);
  }

  function show(state) {
    latest = state;
    const runs = state.runs;
    const title = runs.length === 1 ? runs[0].name : `${runs.length} runs`;
    find("title").textContent = title;
    const open = runs.filter((run) => ["running", "quiet", "waiting"].includes(run.state));
    const share = runs.reduce((sum, run) => sum + (run.planned ? run.done / run.planned : 0), 0) / runs.length;
    document.title = open.length ? `${Math.round(100 * share)} % · ${title}` : `${title}: ended`;
    find("cards").replaceChildren(...runs.map(card));
    curves(runs);
    clients(runs);
    sites(runs);
    messages(runs);
    root.dataset.shown = String(Number(root.dataset.shown || 0) + 1);
  }

  function link(state, words) {
    const place = find("link");
    place.className = `pill ${state}`;
    place.textContent = words;
  }

  async function ask() {
    let wait = document.hidden ? 10000 : 2000;
    try {
      const answer = await fetch("state.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag") || "";
        show(await answer.json());
      } else if (answer.status !== 304) throw new Error(String(answer.status));
      link("good", "connected");
    } catch {
      link("alarm", "visard watch has ended: this is the last state");
      wait = 5000;
    }
    setTimeout(ask, wait);
  }

  function remembered() {
    try { return localStorage.getItem("visard-theme"); } catch { return null; }
  }
  function setTheme(theme) { root.dataset.theme = theme; }
  const saved = remembered();
  setTheme(saved === "dark" || saved === "light" ? saved : dark.matches ? "dark" : "light");
  find("theme").addEventListener("click", () => {
    setTheme(root.dataset.theme === "dark" ? "light" : "dark");
    try { localStorage.setItem("visard-theme", root.dataset.theme); } catch { /* a page without storage forgets */ }
  });
  dark.addEventListener("change", (event) => { if (!remembered()) setTheme(event.matches ? "dark" : "light"); });
  window.addEventListener("resize", () => { if (latest && find("plots").clientWidth !== width) curves(latest.runs); });
  ask();
})();
