"use strict";
// Draws the page's curves as SVG. The data (page.drawing) are lines of arms over finished steps;
// everything else, which arms are shown and over what, is chosen here.
(() => {
  const data = JSON.parse(document.getElementById("drawing").textContent);
  const single = data.arms.length === 1; // then a colour is a quantity, else an arm
  const COLORS = 10; // --c0 to --c9 in page.css
  const DASHES = ["", "7 3", "2 3"]; // of every further ten arms
  const PAPER_DASHES = ["", "6 3", "2 3"];
  const HEIGHT = 236;
  const off = new Set();
  let axis = "steps";
  let withPaper = true;

  function node(name, attributes, parent, text) {
    const svg = ["svg", "path", "line", "circle", "text", "g", "rect", "clipPath"].includes(name);
    const made = svg
      ? document.createElementNS("http://www.w3.org/2000/svg", name)
      : document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  const color = (number) => `var(--c${number % COLORS})`;
  const number = (line) => (single ? line.curve : line.arm);
  const lineName = (panel, line) =>
    single
      ? panel.curves[line.curve]
      : data.arms[line.arm].name + (panel.curves.length > 1 ? ", " + panel.curves[line.curve] : "");

  // A number as a person reads it: shares in percent, large ones with k, M or G.
  function format(value, share) {
    if (value === null || value === undefined) return "-";
    if (share) return `${+(100 * value).toPrecision(3)}%`;
    const size = Math.abs(value);
    for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
      if (size >= limit) {
        const scaled = value / (unit === "k" ? 1e3 : limit);
        return `${+scaled.toPrecision(3)}${unit}`;
      }
    }
    return size !== 0 && size < 1e-3 ? value.toExponential(1) : `${+value.toPrecision(4)}`;
  }

  // Steps -> the chosen axis, between known points on a straight line.
  function place(step, arm) {
    if (axis === "steps") return step;
    const known = data.arms[arm].axes[axis];
    if (!known || step > known.x.at(-1)) return null;
    let i = 1;
    while (i < known.x.length - 1 && known.x[i] < step) i++;
    if (known.x.length === 1) return known.y[0];
    const [a, b] = [known.x[i - 1], known.x[i]];
    return known.y[i - 1] + ((known.y[i] - known.y[i - 1]) * (step - a)) / (b - a);
  }

  function ticks(low, high, most) {
    const rough = (high - low) / most || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
      found.push(i * step);
    }
    return found;
  }

  function logTicks(low, high) {
    const [a, b] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
    const every = Math.max(1, Math.ceil((b - a) / 5));
    const found = [];
    for (let i = a; i <= b; i += every) found.push(10 ** i);
    return found.length > 1 ? found : ticks(low, high, 4); // less than a decade or two
  }

  // A linear or logarithmic scale: value -> pixels, null where there is no place for it.
  function scale(low, high, from, to, log) {
    const t = log ? Math.log10 : (v) => v;
    const span = t(high) - t(low) || 1;
    return (v) =>
      v === null || (log && v <= 0) ? null : from + ((t(v) - t(low)) / span) * (to - from);
  }

  // An SVG path through the points; one that is missing (null) breaks it.
  function path(points) {
    let text = "";
    let pen = "M";
    for (const [x, y] of points) {
      if (x === null || y === null) pen = "M";
      else {
        text += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
        pen = "L";
      }
    }
    return text;
  }

  function band(top, bottom) {
    const both = top.map((point, i) => [point, bottom[i]]);
    const kept = both.filter(([a, b]) => a[0] !== null && a[1] !== null && b[1] !== null);
    if (kept.length < 2) return "";
    return path([...kept.map(([a]) => a), ...kept.map(([, b]) => b).reverse()]) + "Z";
  }

  // The ends of the vertical axis. Of what a step costs, one that was very slow (a compilation) is
  // cut off: it would flatten all the others.
  function limits(panel, lines, paper) {
    let values = lines.flatMap((line) => [
      ...line.y, ...(line.low || []), ...(line.high || []), ...(line.raw || []),
    ]);
    values = values.concat(paper.flatMap((curve) => curve.y));
    values = values.filter((v) => v !== null && (!panel.log || v > 0)).sort((a, b) => a - b);
    if (!values.length) return panel.log ? [0.1, 1] : [0, 1];
    let [low, high] = [values[0], values.at(-1)];
    if (panel.cost) {
      high = Math.min(high, 2 * values[Math.floor(0.95 * (values.length - 1))]);
      low = 0;
    }
    if (panel.log) return [low / 1.3, high * 1.3];
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || (panel.share ? 0.01 : 0.5);
    const bottom = low >= 0 && low - room < 0 ? 0 : low - room;
    return [bottom, panel.share && high <= 1 ? Math.min(1.01, high + room) : high + room];
  }

  function draw(panel, box, width) {
    box.querySelector("svg")?.remove();
    const lines = panel.lines.filter((line) => !off.has(number(line)));
    const paper = withPaper ? panel.paper : [];
    // Lengths of the paper are a hundred times those of a small task: they get an axis of their own.
    const apart = paper.length > 0 && panel.title.includes("length");
    const m = { left: 50, right: apart ? 48 : 12, top: paper.length ? 36 : 10, bottom: 34 };
    const [x0, x1, y0, y1] = [m.left, width - m.right, HEIGHT - m.bottom, m.top];
    const svg = node("svg", {
      viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, tabindex: 0, role: "img",
      "aria-label": `${panel.title}. ` + lines.map((line) =>
        `${lineName(panel, line)}: ${format(line.y[0], panel.share)} to ` +
        format(line.y.at(-1), panel.share)).join("; "),
    });
    box.insertBefore(svg, box.querySelector(".tip"));

    const xs = lines.map((line) => line.x.map((step) => place(step, line.arm)));
    const known = xs.flat().filter((x) => x !== null);
    if (!known.length && !paper.length) {
      node("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, svg, "no data");
      return;
    }
    const [low, high] = limits(panel, lines, apart ? [] : paper);
    const X = scale(Math.min(...known, Infinity), Math.max(...known, -Infinity), x0, x1, false);
    const Y = scale(low, high, y0, y1, panel.log);
    const clip = `clip${panel.index}`;
    node("rect", { x: x0 - 4, y: y1 - 4, width: x1 - x0 + 8, height: y0 - y1 + 8 },
      node("clipPath", { id: clip }, svg));

    for (const v of panel.log ? logTicks(low, high) : ticks(low, high, 5)) {
      node("line", { x1: x0, x2: x1, y1: Y(v), y2: Y(v), class: "grid" }, svg);
      node("text", { x: x0 - 6, y: Y(v) + 4, "text-anchor": "end" }, svg, format(v, panel.share));
    }
    if (known.length) {
      const [a, b] = [Math.min(...known), Math.max(...known)];
      for (const v of ticks(a, b, Math.max(3, width / 60))) {
        if (axis === "steps" && v % 1) continue;
        node("text", { x: X(v), y: y0 + 16, "text-anchor": "middle" }, svg, format(v));
      }
      node("text", { x: x1, y: y0 + 30, "text-anchor": "end", class: "label" }, svg,
        data.axes[axis]);
    }
    node("line", { x1: x0, x2: x1, y1: y0, y2: y0, class: "axis" }, svg);

    const area = node("g", { "clip-path": `url(#${clip})` }, svg);
    drawPaper(panel, paper, apart, { svg, area, x0, x1, y0, y1, Y });
    lines.forEach((line, i) => {
      const at = (values) => values.map((v, j) => [xs[i][j] === null ? null : X(xs[i][j]), Y(v)]);
      const paint = color(number(line));
      const dash = single ? "" : DASHES[Math.floor(line.arm / COLORS) % DASHES.length];
      const style = `stroke:${paint};fill:none`;
      if (line.low) {
        node("path", { d: band(at(line.high), at(line.low)), style: `fill:${paint}`, class: "band" },
          area);
      }
      if (line.raw) node("path", { d: path(at(line.raw)), style, class: "raw" }, area);
      // Beyond the last step that all seeds have, the mean is of fewer: thin and dashed.
      const all = line.count ? line.count.map((n) => n === data.arms[line.arm].runs) : null;
      const points = at(line.y);
      node("path", { d: path(all ? points.map((p, j) => (all[j] ? p : [null, null])) : points),
        style, class: "line", "stroke-dasharray": dash }, area);
      if (all && all.includes(false)) {
        const few = points.map((p, j) => (!all[j] || all[j + 1] === false ? p : [null, null]));
        node("path", { d: path(few), style, class: "few" }, area);
      }
      for (const [x, y] of points) {
        if ((line.marks || points.length === 1) && x !== null && y !== null) {
          node("circle", { cx: x, cy: y, r: 3, style: `fill:${paint}` }, area);
        }
      }
    });
    hover(panel, box, svg, lines, xs, { X, Y, x0, x1, y0, y1, width });
  }

  // The paper's curves: their own horizontal axis on top, from their first to their last step.
  function drawPaper(panel, paper, apart, { svg, area, x0, x1, y0, y1, Y }) {
    if (!paper.length) return;
    const last = Math.max(...paper.map((curve) => curve.x.at(-1)));
    const PX = scale(0, last, x0, x1, false);
    let PY = Y;
    if (apart) {
      const top = 1.06 * Math.max(...paper.flatMap((curve) => curve.y));
      PY = scale(0, top, y0, y1, false);
      for (const v of ticks(0, top, 5)) {
        node("text", { x: x1 + 6, y: PY(v) + 4, class: "paper" }, svg, format(v));
      }
    }
    for (const v of ticks(0, last, 4)) {
      node("text", { x: PX(v), y: y1 - 7, "text-anchor": "middle", class: "paper" }, svg, format(v));
    }
    node("line", { x1: x0, x2: x1, y1: y1 - 3, y2: y1 - 3, class: "axis" }, svg);
    node("text", { x: x1, y: y1 - 22, "text-anchor": "end", class: "paper" }, svg,
      "the paper's rollout steps" + (apart ? " (right axis)" : ""));
    paper.forEach((curve, i) => {
      const points = curve.x.map((x, j) => [PX(x), PY(curve.y[j])]);
      node("path", { d: path(points), class: "theirs",
        "stroke-dasharray": PAPER_DASHES[i % PAPER_DASHES.length] }, area);
    });
  }

  // Pointer, touch or arrow keys: the values of all lines at the nearest step.
  function hover(panel, box, svg, lines, xs, { X, Y, x0, x1, y0, y1, width }) {
    const tip = box.querySelector(".tip");
    const mark = node("g", {}, svg);
    const steps = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    let chosen = steps.length - 1;

    const pixel = (step) => {
      for (let i = 0; i < lines.length; i++) {
        const x = place(step, lines[i].arm);
        if (x !== null) return X(x);
      }
      return null;
    };
    function nearest(line, i, x) {
      let best = -1;
      xs[i].forEach((v, j) => {
        if (v === null) return;
        if (best < 0 || Math.abs(X(v) - x) < Math.abs(X(xs[i][best]) - x)) best = j;
      });
      return best;
    }
    function show(x) {
      mark.replaceChildren();
      tip.replaceChildren();
      node("line", { x1: x, x2: x, y1: y1, y2: y0, class: "axis" }, mark);
      const rows = lines
        .map((line, i) => [line, i, nearest(line, i, x)])
        .filter(([, i, j]) => j >= 0 && Math.abs(X(xs[i][j]) - x) < 40)
        .sort(([a, , i], [b, , j]) => b.y[j] - a.y[i]);
      if (!rows.length) return;
      const [first, k, at] = rows[0];
      const text = axis === "steps" ? `after ${first.x[at]} steps`
        : `${format(xs[k][at])} ${data.axes[axis]}`;
      node("b", {}, tip, text);
      for (const [line, i, j] of rows) {
        const row = node("div", {}, tip);
        node("i", { style: `background:${color(number(line))}` }, row);
        let text = `${format(line.y[j], panel.share)}  ${lineName(panel, line)}`;
        if (line.low) {
          const few = line.count[j] < data.arms[line.arm].runs ? `, ${line.count[j]} seeds` : "";
          text += ` (${format(line.low[j], panel.share)} to ${format(line.high[j], panel.share)}` +
            `${few})`;
        } else if (line.raw) text += ` (this step ${format(line.raw[j], panel.share)})`;
        row.append(text);
        const y = Y(line.y[j]);
        if (y !== null && y > y1 - 4) {
          node("circle", { cx: X(xs[i][j]), cy: y, r: 4, class: "dot",
            style: `fill:${color(number(line))}` }, mark);
        }
      }
      tip.hidden = false;
      const left = x > width / 2 ? Math.max(0, x - tip.offsetWidth - 14) : x + 14;
      tip.style.left = `${Math.min(left, Math.max(0, width - tip.offsetWidth))}px`;
    }
    function hide() {
      tip.hidden = true;
      mark.replaceChildren();
    }
    svg.addEventListener("pointermove", (event) => {
      show(Math.min(x1, Math.max(x0, event.clientX - svg.getBoundingClientRect().left)));
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || !steps.length) return;
      event.preventDefault();
      chosen = Math.min(steps.length - 1, Math.max(0, chosen + by));
      const x = pixel(steps[chosen]);
      if (x !== null) show(x);
    });
  }

  function toggle(bar, text, style, change) {
    const chip = node("button", { type: "button", "aria-pressed": "true" }, bar);
    node("i", { style }, chip);
    chip.append(text);
    chip.addEventListener("click", () => {
      const on = chip.getAttribute("aria-pressed") !== "true";
      chip.setAttribute("aria-pressed", on);
      change(on);
      drawAll();
    });
  }

  function toolbar() {
    const bar = document.getElementById("curve-bar");
    const label = node("label", {}, bar, "over ");
    const select = node("select", {}, label);
    for (const [value, text] of Object.entries(data.axes)) node("option", { value }, select, text);
    select.addEventListener("change", () => {
      axis = select.value;
      drawAll();
    });
    const set = (index) => (on) => (on ? off.delete(index) : off.add(index));
    const same = data.arms.every((arm) => arm.runs === data.arms[0].runs);
    if (!single) {
      data.arms.forEach((arm, i) => {
        const seeds = same ? "" : ` (${arm.runs} seed${arm.runs > 1 ? "s" : ""})`;
        const line = i < COLORS ? "" : ";opacity:.6";
        toggle(bar, arm.name + seeds, `background:${color(i)}${line}`, set(i));
      });
    }
    if (data.panels.some((panel) => panel.paper.length)) {
      toggle(bar, "the paper's curves", "background:var(--paper)", (on) => (withPaper = on));
    }
  }

  function legend(panel, box) {
    const shown = single && panel.curves.length > 1 ? panel.curves : [];
    if (!shown.length && !panel.paper.length) return;
    const list = node("div", { class: "legend" }, box);
    shown.forEach((name, i) => {
      if (!panel.lines.some((line) => line.curve === i)) return;
      const entry = node("span", {}, list);
      node("i", { style: `background:${color(i)}` }, entry);
      entry.append(name);
    });
    panel.paper.forEach((curve, i) => {
      const entry = node("span", { class: "of-paper" }, list);
      const svg = node("svg", { width: 22, height: 8 }, entry);
      node("path", { d: "M0 4L22 4", class: "theirs",
        "stroke-dasharray": PAPER_DASHES[i % PAPER_DASHES.length] }, svg);
      entry.append(curve.name);
    });
  }

  const boxes = [];
  function drawAll() {
    document.body.classList.toggle("no-paper", !withPaper);
    // All widths are read before anything is drawn: each reading after a change lays out the page.
    const widths = boxes.map(([, box]) => Math.max(240, box.clientWidth));
    boxes.forEach(([panel, box], i) => draw(panel, box, widths[i]));
  }

  toolbar();
  const empty = [];
  data.panels.forEach((panel, index) => {
    panel.index = index;
    if (!panel.lines.length) {
      empty.push(panel.title);
      return;
    }
    const grid = document.getElementById(panel.cost ? "cost-panels" : "learning-panels");
    const figure = node("figure", {}, grid);
    node("figcaption", {}, figure, panel.title);
    const box = node("div", { class: "plot" }, figure);
    node("div", { class: "tip" }, box).hidden = true;
    legend(panel, figure);
    boxes.push([panel, box]);
  });
  if (empty.length) {
    document.getElementById("empty-panels").textContent = `No data: ${empty.join(", ")}.`;
  }
  drawAll();
  let width = innerWidth;
  let waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 100);
  });
})();
