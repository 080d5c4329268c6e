"use strict";
// The report's charts: axes, values under the pointer, and the legend's switches. The curves are in the page, as SVG.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const REFRESH_SECONDS = 2;
  const LOAD = 20; // after a refresh that took t seconds, the next one starts at least LOAD * t seconds later
  const off = { run: new Set(), kind: new Set() }; // hidden runs and kinds of curves; a refresh keeps them
  let charts = [];

  const make = (name, attributes, content) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (content !== undefined) element.textContent = content;
    return element;
  };

  const isShown = (curve) => !off.run.has(curve.run) && !off.kind.has(curve.kind);

  function read(figure) {
    const svg = figure.querySelector(":scope > svg");
    const curves = [...svg.querySelectorAll(".plot path.line")].map((path) => {
      const group = path.parentNode;
      const points = path.getAttribute("d").slice(1).split(" ").map((place) => {
        const [step, value] = place.split(",").map(Number);
        return [step, -value];
      });
      const { kind, name } = path.dataset;
      return { run: group.dataset.run, label: group.dataset.label, color: group.getAttribute("class"), kind, name, points };
    });
    const chart = { figure, svg, curves, zero: "zero" in svg.dataset, view: null };
    // Chromium draws no paths in a viewBox smaller than about one unit, but learning rates are smaller: enlarge the coordinates.
    const { left, right, low, high } = rangeOf(chart);
    chart.scale = [1000 / (right - left), 1000 / (high - low)];
    for (const path of svg.querySelectorAll(".plot path")) {
      const scaled = (_, step, value) => `${step * chart.scale[0]},${value * chart.scale[1]}`;
      path.setAttribute("d", path.getAttribute("d").replace(/([^Mh ,]+),([^Mh ]+)/g, scaled));
    }
    return chart;
  }

  function ticks(low, high, most) {
    const raw = (high - low) / Math.max(1, most);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= raw * 0.9999);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-6); n * step <= high + 1e-6 * step; n += 1) found.push(n * step);
    return { step, found };
  }

  function label(value, step) {
    const size = Math.abs(value);
    if (size < step / 1e6) return "0";
    if (size >= 1e6 && size < 1e15) {
      const unit = 1000 ** Math.floor(Math.log10(size) / 3 + 1e-9);
      const most = Math.max(3, Math.ceil(Math.log10(unit / step) - 1e-9)); // neighbouring ticks must have different labels
      return value.toLocaleString("en-US", { notation: "compact", maximumFractionDigits: most });
    }
    if (size >= 1e15 || step < 1e-5) return Number(value.toPrecision(6)).toExponential();
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }

  const shortened = (value) =>
    value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)
      ? value.toExponential(3)
      : Number(value.toPrecision(5)).toLocaleString("en-US", { maximumFractionDigits: 6 });

  function rangeOf(chart) {
    let curves = chart.curves.filter(isShown);
    if (!curves.length) curves = chart.curves;
    let [left, right, low, high] = [Infinity, -Infinity, chart.zero ? 0 : Infinity, chart.zero ? 0 : -Infinity];
    for (const { points } of curves) {
      for (const [step, value] of points) {
        [left, right] = [Math.min(left, step), Math.max(right, step)];
        [low, high] = [Math.min(low, value), Math.max(high, value)];
      }
    }
    if (left > 0 && left < 0.2 * right) left = 0;
    if (left === right) [left, right] = [left - 1, right + 1];
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return { left, right, low: low >= 0 ? Math.max(0, low - pad) : low - pad, high: high + pad };
  }

  function draw(chart) {
    const { svg, figure } = chart;
    const view = (chart.view = rangeOf(chart));
    const { width, height } = svg.getBoundingClientRect();
    chart.x = (step) => ((step - view.left) / (view.right - view.left)) * width;
    chart.y = (value) => ((view.high - value) / (view.high - view.low)) * height;
    const [xScale, yScale] = chart.scale;
    const box = [view.left * xScale, -view.high * yScale, (view.right - view.left) * xScale, (view.high - view.low) * yScale];
    svg.querySelector(".plot").setAttribute("viewBox", box.join(" "));
    for (const path of svg.querySelectorAll(".plot path")) {
      const { run } = path.parentNode.dataset;
      path.classList.toggle("off", !isShown({ run, kind: path.dataset.kind }));
    }
    const parts = [];
    const rows = ticks(view.low, view.high, Math.max(2, height / 45));
    for (const value of rows.found) {
      const y = chart.y(value);
      parts.push(make("line", { x1: 0, x2: width, y1: y, y2: y, class: value === 0 ? "base" : "" }));
      parts.push(make("text", { x: -8, y: y + 4, "text-anchor": "end" }, label(value, rows.step)));
    }
    const columns = ticks(view.left, view.right, Math.max(2, Math.min(10, width / 85)));
    for (const step of columns.found.filter(Number.isInteger)) {
      const x = chart.x(step);
      parts.push(make("line", { x1: x, x2: x, y1: height, y2: height + 5, class: "base" }));
      const last = x > width - 24; // the tick's label must not leave the page
      const place = { x: last ? Math.min(x + 24, width + 8) : x, "text-anchor": last ? "end" : "middle" };
      parts.push(make("text", { ...place, y: height + 19 }, label(step, columns.step)));
    }
    parts.push(make("line", { x1: 0, x2: width, y1: height, y2: height, class: "base" }));
    parts.push(make("text", { x: width, y: height + 37, "text-anchor": "end" }, "optimizer step"));
    svg.querySelector(".axes").replaceChildren(...parts);
    showValues(chart, null);
  }

  // -- the values under the pointer

  const nearest = (points, step) =>
    points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));

  function showValues(chart, step, top) {
    const tip = chart.figure.querySelector(".tip");
    const cursor = chart.svg.querySelector(".cursor");
    const curves = chart.curves.filter(isShown);
    tip.hidden = step === null || !curves.length;
    chart.at = tip.hidden ? null : step;
    if (tip.hidden) return cursor.replaceChildren();
    // Take the step of the value that is closest to the pointer; other curves show a value if they have one near this step.
    const at = nearest(curves.map(({ points }) => nearest(points, step)), step)[0];
    const reach = 12 / (chart.x(1) - chart.x(0)); // in steps
    const found = curves.map((curve) => ({ ...curve, point: nearest(curve.points, at) }))
      .filter((curve) => Math.abs(curve.point[0] - at) <= reach);
    const dots = found.map(({ color, point: [x, y] }) => make("circle", { cx: chart.x(x), cy: chart.y(y), r: 4, class: color }));
    const x = chart.x(at);
    cursor.replaceChildren(make("line", { x1: x, x2: x, y1: 0, y2: "100%" }), ...dots);
    tip.replaceChildren(tableOf(at, found));
    const space = chart.figure.clientWidth;
    const left = x + 52 + 14;
    const fits = left + tip.offsetWidth <= space;
    tip.style.left = `${Math.max(0, fits ? left : x + 52 - 14 - tip.offsetWidth)}px`;
    tip.style.top = `${chart.svg.getBoundingClientRect().top - chart.figure.getBoundingClientRect().top + (top ?? 10)}px`;
  }

  function tableOf(at, found) {
    const kinds = [...new Map(found.map(({ kind, name }) => [kind, name]))];
    const runs = [...new Map(found.map(({ run, label: text, color }) => [run, { text, color }]))];
    const table = document.createElement("table");
    const head = table.insertRow();
    const cell = (row, tag, text) => row.appendChild(Object.assign(document.createElement(tag), { textContent: text }));
    cell(head, "th", `step ${at.toLocaleString("en-US")}`);
    for (const [, name] of kinds) cell(head, "th", kinds.length > 1 ? name : "");
    for (const [run, { text, color }] of runs) {
      const row = table.insertRow();
      const first = cell(row, "td", "");
      first.append(Object.assign(document.createElement("i"), { className: color }), text);
      for (const [kind] of kinds) {
        const curve = found.find((one) => one.run === run && one.kind === kind);
        cell(row, "td", curve ? shortened(curve.point[1]) : "");
      }
    }
    return table;
  }

  function follow(chart) {
    const { svg } = chart;
    const move = (event) => {
      const box = svg.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      const step = chart.view.left + share * (chart.view.right - chart.view.left);
      showValues(chart, step, event.clientY - box.top < box.height / 2 ? box.height / 2 + 10 : 0);
    };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    for (const name of ["pointerleave", "blur"]) svg.addEventListener(name, () => showValues(chart, null));
    svg.addEventListener("keydown", (event) => {
      const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") showValues(chart, null);
      if (!direction) return;
      event.preventDefault();
      const steps = [...new Set(chart.curves.filter(isShown).flatMap(({ points }) => points.map(([step]) => step)))];
      steps.sort((one, other) => one - other);
      if (!steps.length) return;
      const now = chart.at === null ? (direction > 0 ? -1 : steps.length) : steps.indexOf(nearest(steps.map((step) => [step]), chart.at)[0]);
      showValues(chart, steps[Math.min(steps.length - 1, Math.max(0, now + direction))]);
    });
  }

  // -- the legend

  function showSwitches() {
    for (const button of document.querySelectorAll("button[aria-pressed]")) {
      const [name, value] = Object.entries(button.dataset)[0];
      button.setAttribute("aria-pressed", String(!off[name].has(value)));
    }
    charts.forEach(draw);
  }

  function toggle({ run, kind }) {
    const [name, value] = run === undefined ? ["kind", kind] : ["run", run];
    if (!off[name].delete(value)) off[name].add(value);
    showSwitches();
  }

  function isolate(run) {
    const others = [...document.querySelectorAll("button[data-run]")].map((button) => button.dataset.run).filter((one) => one !== run);
    const alone = !off.run.has(run) && others.every((one) => off.run.has(one));
    off.run = new Set(alone ? [] : others);
    showSwitches();
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[aria-pressed]");
    if (button) toggle(button.dataset);
  });
  document.addEventListener("dblclick", (event) => {
    const button = event.target.closest("button[data-run]");
    if (button) isolate(button.dataset.run); // the two clicks of the double-click have cancelled each other
  });

  // -- refreshing

  function setUp() {
    charts = [...document.querySelectorAll("figure.chart:not(.empty)")].map(read);
    charts.forEach(follow);
    showSwitches();
  }

  function replace(main) {
    const open = new Set([...document.querySelectorAll("details[open]")].map(({ id }) => id));
    const pointed = charts.map(({ at }) => at);
    document.querySelector("main").replaceWith(document.adoptNode(main));
    for (const details of document.querySelectorAll("details")) details.open = open.has(details.id);
    setUp();
    charts.forEach((chart, number) => pointed[number] != null && showValues(chart, pointed[number]));
  }

  async function refresh(known) {
    const began = performance.now();
    const status = document.getElementById("live");
    let version = known;
    try {
      const answer = await fetch(location.href, { headers: known ? { "If-None-Match": known } : {}, cache: "no-store" });
      if (!answer.ok && answer.status !== 304) throw new Error(`status ${answer.status}`);
      if (answer.status === 200) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        replace(page.querySelector("main"));
        document.title = page.title;
        version = answer.headers.get("ETag");
      }
      status.textContent = `live, checked at ${new Date().toLocaleTimeString()}`;
      status.dataset.time = new Date().toLocaleTimeString();
    } catch (error) {
      const since = status.dataset.time ? ` since ${status.dataset.time}` : "";
      status.textContent = `no longer live: the report's server has not answered${since}`;
    }
    const took = (performance.now() - began) / 1000;
    setTimeout(refresh, 1000 * Math.max(REFRESH_SECONDS, LOAD * took), version);
  }

  let width = 0;
  addEventListener("resize", () => {
    if (width !== innerWidth) charts.forEach(draw); // redraw only for a new width: on a phone, scrolling changes the height
    width = innerWidth;
  });
  setUp();
  if ("refresh" in document.documentElement.dataset) refresh();
})();
