"use strict";
// Draws a run. All text of the log reaches the page through textContent or a canvas, never as markup.
(() => {
  const D = JSON.parse(document.getElementById("data").textContent);
  const AXIS = D.steps.length ? 44 : 26;
  const FAILED = 1, ROLLED_BACK = 2, UNFINISHED = 4;
  const GUTTER = 118, PAD = 10;
  const HEIGHT = { scope: 22, transition: 14, call: 16, event: 14, rank: 9 };
  const MEMORY = D.lanes.length < 2 ? 150 : D.lanes.length < 4 ? 104 : 74, HEAD = 26, GAP = 3;
  const MODES = ["training", "logprob", "generation", "refit", "resident", "offloaded"];
  const EXTRA = ["c-4", "c-5", "c-6"];
  const $ = (id) => document.getElementById(id);
  const FONT = getComputedStyle(document.body).fontFamily;

  // -- words -------------------------------------------------------------------------------------------------------

  const three = (x) => (Math.abs(x) < 9.995 ? x.toFixed(2) : Math.abs(x) < 99.95 ? x.toFixed(1) : Math.round(x).toLocaleString("en"));
  const bytes = (n) => {
    for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (n >= size * 0.9995) return `${three(n / size)} ${unit}`;
    return `${n} B`;
  };
  const time = (us) => {
    const s = us / 1e6;
    if (s >= 3600) { const m = Math.round(s / 60); return `${Math.floor(m / 60)} h ${String(m % 60).padStart(2, "0")} min`; }
    if (s >= 100) { const r = Math.round(s); return `${Math.floor(r / 60)} min ${String(r % 60).padStart(2, "0")} s`; }
    if (s >= 0.9995) return `${three(s)} s`;
    if (us >= 999.5) return `${three(us / 1e3)} ms`;
    return `${Math.round(us)} µs`;
  };
  const share = (x) => `${(x * 100).toFixed(x < 0.1 ? 1 : 0)}%`;
  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "class") node.className = value;
      else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else node.setAttribute(key, value);
    }
    for (const child of children) if (child !== null) node.append(child);  // append() takes a string as text
    return node;
  };

  // -- data --------------------------------------------------------------------------------------------------------

  const rows = [];
  for (const lane of D.lanes) {
    for (const row of lane.rows) {
      row.lane = lane;
      row.index = rows.length;
      row.n = row.t0.length;
      // The latest end so far grows along the row, so that the first visible item is found by halving.
      row.latest = new Float64Array(row.n);
      row.longest = 0;
      for (let i = 0, end = -Infinity; i < row.n; i++) { end = Math.max(end, row.t1[i]); row.latest[i] = end; }
      row.bad = [];
      for (let i = 0; i < row.n; i++) if (row.flags[i] & FAILED) row.bad.push(i);
      rows.push(row);
    }
    const memory = lane.memory;
    memory.n = memory.times.length;
    for (const series of memory.series) {
      const values = new Float64Array(memory.n);
      for (let k = 0; k < series.at.length; k++) values.fill(series.nbytes[k], series.at[k], k + 1 < series.at.length ? series.at[k + 1] : memory.n);
      series.values = values;
      series.peak = series.nbytes.reduce((a, b) => Math.max(a, b), 0);
    }
    memory.device = new Float64Array(memory.n);
    memory.all = new Float64Array(memory.n);
    for (const series of memory.series) for (let k = 0; k < memory.n; k++) {
      memory.all[k] += series.values[k];
      if (series.tier === "device") memory.device[k] += series.values[k];
    }
  }
  const topMemory = Math.max(1, ...D.lanes.map((lane) => lane.memory.all.reduce((a, b) => Math.max(a, b), 0)));
  const topDevice = Math.max(...D.lanes.map((lane) => lane.memory.device.reduce((a, b) => Math.max(a, b), 0)), 0);
  const components = [...new Set(D.lanes.flatMap((lane) => lane.memory.series.map((series) => series.component)))];
  const tiers = new Set(D.lanes.flatMap((lane) => lane.memory.series.map((series) => series.tier)));

  const total = { moved: 0, elided: 0, moving: 0, transitions: 0, failed: 0, rejected: 0, warnings: 0, unfinished: 0 };
  const byMode = new Map(), byMove = new Map(), byCall = new Map(), slowest = [], trouble = [];
  const count = (map, key, row, i) => {
    const entry = map.get(key) ?? { n: 0, us: 0, moved: 0, elided: 0, failed: 0 };
    map.set(key, entry);
    entry.n++; entry.us += row.t1[i] - row.t0[i]; entry.moved += row.moved[i]; entry.elided += row.elided[i];
    entry.failed += row.flags[i] & FAILED;
  };
  const movingSpans = [];
  for (const row of rows) {
    const who = row.lane.name;
    for (let i = 0; i < row.n; i++) {
      const name = D.names[row.name[i]];
      if (row.flags[i] & UNFINISHED) total.unfinished++;
      if (row.flags[i] & (FAILED | UNFINISHED) && trouble.length < 200) trouble.push([row.index, i]);
      if (row.kind === "scope") count(byMode, JSON.stringify([who, name]), row, i);
      else if (row.kind === "call") count(byCall, JSON.stringify([who, name]), row, i);
      else if (row.kind === "transition") {
        count(byMove, JSON.stringify([who, name]), row, i);
        total.transitions++; total.moved += row.moved[i]; total.elided += row.elided[i];
        movingSpans.push([row.t0[i], row.t1[i]]);
        slowest.push([row.index, i]);
      } else if (row.kind === "event") {
        if (name === "guard.rejected") total.rejected++;
        if (name === "warning") total.warnings++;
      }
      if (row.kind === "transition" || row.kind === "call") total.failed += row.flags[i] & FAILED;
    }
  }
  const lasts = ([r, i]) => rows[r].t1[i] - rows[r].t0[i];
  slowest.sort((a, b) => lasts(b) - lasts(a)).splice(6);
  trouble.sort((a, b) => rows[a[0]].t0[a[1]] - rows[b[0]].t0[b[1]]);
  // A scope that failed because of what is inside it is no trouble of its own.
  const isEcho = ([r, i]) => rows[r].kind === "scope" && trouble.some(([q, k]) => rows[q].kind !== "scope" && rows[q].lane === rows[r].lane
    && rows[q].t0[k] >= rows[r].t0[i] && rows[q].t1[k] <= rows[r].t1[i] && rows[q].flags[k] & rows[r].flags[i]);
  trouble.splice(0, trouble.length, ...trouble.filter((item) => !isEcho(item)));
  // Policies may move at the same time: what counts is how long anything did.
  movingSpans.sort((a, b) => a[0] - b[0]);
  let reached = 0;
  for (const [a, b] of movingSpans) { total.moving += Math.max(0, b - Math.max(a, reached)); reached = Math.max(reached, b); }

  // -- colours -----------------------------------------------------------------------------------------------------

  let ink = {};
  const componentColour = (name) => {
    const own = ink[`c-${name}`];
    if (own) return own;
    const others = components.filter((other) => !ink[`c-${other}`]);
    return ink[EXTRA[others.indexOf(name) % EXTRA.length]] ?? ink.faint;
  };
  const modeColour = (name) => ink[MODES.includes(name) ? name : "resident"];
  let hatches = new Map();
  const hatch = (colour) => {
    let pattern = hatches.get(colour);
    if (!pattern) {
      const ratio = devicePixelRatio || 1, size = 6, tile = document.createElement("canvas");
      tile.width = tile.height = Math.round(size * ratio);
      const g = tile.getContext("2d");
      const s = tile.width;
      g.fillStyle = colour; g.globalAlpha = 0.16; g.fillRect(0, 0, s, s);
      g.globalAlpha = 0.6; g.strokeStyle = colour; g.lineWidth = 1.1 * ratio;
      g.beginPath();
      for (const d of [-s, 0, s]) { g.moveTo(d - 2, s + 2); g.lineTo(d + s + 2, -2); }
      g.stroke();
      pattern = lanes.getContext("2d").createPattern(tile, "repeat");
      pattern.setTransform(new DOMMatrix().scale(1 / ratio));
      hatches.set(colour, pattern);
    }
    return pattern;
  };
  const readInk = () => {
    const style = getComputedStyle(document.documentElement);
    const names = ["paper", "panel", "ink", "soft", "faint", "line", "grid", "band", "accent", "bad", "bad-soft", "moved", "elided", "call", "event",
      "on-mode", ...MODES, "c-params", "c-optimizer", "c-grads", "c-reference", "c-buffers", ...EXTRA];
    ink = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    hatches = new Map();
  };

  // -- layout ------------------------------------------------------------------------------------------------------

  const overview = $("overview"), axis = $("axis"), lanes = $("lanes"), stage = $("stage");
  let width = 800, height = 100;
  let chosen = null, hovered = null, hoverX = null;
  const END = D.end, MIN_SPAN = 20;
  const margin = END * 0.01;
  let v0 = -margin, v1 = END + margin;
  const X = (t) => GUTTER + ((t - v0) / (v1 - v0)) * (width - GUTTER - PAD);
  const T = (x) => v0 + ((x - GUTTER) / (width - GUTTER - PAD)) * (v1 - v0);

  const layOut = () => {
    let y = 0;
    for (const lane of D.lanes) {
      lane.y = y;
      y += HEAD;
      for (const row of lane.rows) { row.y = y; row.h = HEIGHT[row.kind]; y += row.h + GAP; }
      if (lane.memory.n) { y += 5; lane.memory.y = y; y += MEMORY + GAP; } else lane.memory.y = null;
      y += 9;
      lane.h = y - lane.y;
    }
    height = Math.max(60, y);
  };
  const size = (canvas, h) => {
    const ratio = devicePixelRatio || 1;
    canvas.style.height = `${h}px`;
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(h * ratio);
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, width, h);
    g.textBaseline = "middle";
    return g;
  };
  let isAsked = false;
  const draw = () => {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => { isAsked = false; drawNow(); });
  };
  const drawNow = () => {
    width = Math.max(320, stage.clientWidth);
    drawOverview(size(overview, 40));
    drawAxis(size(axis, AXIS));
    drawLanes(size(lanes, height));
  };

  // -- overview and axis -------------------------------------------------------------------------------------------

  const OX = (t) => GUTTER + (t / END) * (width - GUTTER - PAD);
  const OT = (x) => ((x - GUTTER) / (width - GUTTER - PAD)) * END;
  const label = (g, text, x, y, colour, weight = 400, align = "left", px = 12) => {
    g.font = `${weight} ${px}px ${FONT}`; g.fillStyle = colour; g.textAlign = align; g.fillText(text, x, y);
  };
  const firstFrom = (sorted, value) => {
    let low = 0, high = sorted.length;
    while (low < high) { const mid = (low + high) >> 1; if (sorted[mid] < value) low = mid + 1; else high = mid; }
    return low;
  };
  // Pixel by pixel over the whole run: the most on the device, and the share of time spent moving. Depends on the width alone.
  let whole = { n: 0 };
  const overviewOf = (n) => {
    if (whole.n === n) return whole;
    const peak = new Float64Array(n), moving = new Float64Array(n + 1);
    if (topDevice) for (let p = 0; p < n; p++) {
      for (const { memory } of D.lanes) peak[p] += peakDevice(memory, (p / n) * END, ((p + 1) / n) * END);
    }
    for (const [a, b] of movingSpans) spread(moving, (a / END) * n, (b / END) * n);
    whole = { n, peak, moving };
    return whole;
  };
  const drawOverview = (g) => {
    const n = Math.max(1, Math.floor(width - GUTTER - PAD)), { peak, moving } = overviewOf(n);
    if (topDevice) {
      const top = peak.reduce((a, b) => Math.max(a, b), 1);
      g.fillStyle = ink.faint; g.globalAlpha = 0.35;
      for (let p = 0; p < n; p++) { const h = (peak[p] / top) * 24; g.fillRect(GUTTER + p, 32 - h, 1, h); }
      g.globalAlpha = 1;
    }
    g.fillStyle = ink.moved;
    for (let p = 0; p < n; p++) if (moving[p] > 0) { g.globalAlpha = 0.3 + 0.7 * Math.min(1, moving[p]); g.fillRect(GUTTER + p, 33, 1, 3); }
    g.globalAlpha = 1;
    g.fillStyle = ink.bad;
    for (const [r, i] of trouble) g.fillRect(Math.round(OX(rows[r].t0[i])) - 1, 3, 2, 5);
    label(g, topDevice ? "device memory" : "whole run", 12, 20, ink.soft, 400, "left", 11.5);
    const a = Math.max(GUTTER, OX(v0)), b = Math.min(width - PAD, OX(v1));
    if (v0 > 0 || v1 < END) {
      g.fillStyle = ink.panel; g.globalAlpha = 0.66;
      g.fillRect(GUTTER, 0, a - GUTTER, 40); g.fillRect(b, 0, width - PAD - b, 40);
      g.globalAlpha = 1; g.strokeStyle = ink.accent; g.lineWidth = 1.5;
      g.strokeRect(a, 1.5, Math.max(3, b - a), 37);
    }
    if (dragging?.kind === "overview") shade(g, 40);
  };
  const peakDevice = (memory, a, b) => {
    if (!memory.n) return 0;
    let k = Math.max(0, firstFrom(memory.times, a) - 1), top = memory.times[k] > b ? 0 : memory.device[k];
    for (k++; k < memory.n && memory.times[k] <= b; k++) top = Math.max(top, memory.device[k]);
    return top;
  };
  const spread = (cover, x0, x1) => {
    const a = Math.max(0, Math.floor(x0)), b = Math.min(cover.length - 1, Math.floor(x1));
    if (a === b) { cover[a] += Math.max(0.05, x1 - x0); return; }
    cover[a] += a + 1 - x0;
    for (let p = a + 1; p < b; p++) cover[p] = 1;
    if (b > a) cover[b] += x1 - b;
  };
  const shade = (g, h) => {
    const a = Math.min(dragging.x0, dragging.x1), b = Math.max(dragging.x0, dragging.x1);
    g.fillStyle = ink.accent; g.globalAlpha = 0.18; g.fillRect(a, 0, b - a, h); g.globalAlpha = 1;
  };
  const niceStep = (span, wanted) => {
    const raw = span / wanted, power = 10 ** Math.floor(Math.log10(raw)), part = raw / power;
    return power * (part <= 1 ? 1 : part <= 2 ? 2 : part <= 5 ? 5 : 10);
  };
  const ticks = () => {
    const wanted = (v1 - v0) / ((width - GUTTER) / 110), out = [];
    const round = [10, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400].map((s) => s * 1e6);
    const step = wanted <= 5e6 ? Math.max(1, niceStep(v1 - v0, (width - GUTTER) / 110)) : round.find((s) => s >= wanted) ?? niceStep(v1 - v0, 8);
    for (let t = Math.ceil(Math.max(0, v0) / step) * step; t <= Math.min(v1, END * 1.0001); t += step) out.push(t);
    return [out, step];
  };
  const tickText = (t, step) => {
    if (t === 0) return "0";
    const s = t / 1e6;
    if (step >= 60e6) { const m = Math.round(s / 60); return m >= 60 ? `${Math.floor(m / 60)} h ${String(m % 60).padStart(2, "0")}` : `${m} min`; }
    if (s >= 60 && step >= 1e6) { const r = Math.round(s); return `${Math.floor(r / 60)}:${String(r % 60).padStart(2, "0")}`; }
    const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step / 1e6) + 1e-9)));
    return END < 1e6 && step >= 1 ? `${(t / 1e3).toFixed(Math.max(0, digits - 3))} ms` : `${s.toFixed(digits)} s`;
  };
  const instant = (t) => tickText(Math.max(0.001, t), Math.min(1e6, Math.max(1, 10 ** Math.floor(Math.log10((v1 - v0) / 400)))));
  const visibleSteps = () => {
    const out = [];
    let low = 0, high = D.steps.length;
    while (low < high) { const mid = (low + high) >> 1; if (D.steps[mid][2] < v0) low = mid + 1; else high = mid; }
    for (let k = low; k < D.steps.length && D.steps[k][1] <= v1; k++) out.push(k);
    return out;
  };
  const drawAxis = (g) => {
    g.fillStyle = ink.panel; g.fillRect(0, 0, width, AXIS);
    const [at, step] = ticks();
    for (const t of at) label(g, tickText(t, step), X(t), AXIS - 11, ink.soft, 400, "center", 11.5);
    label(g, "time", 12, AXIS - 11, ink.soft, 400, "left", 11.5);
    if (D.steps.length) {
      label(g, "step", 12, 12, ink.soft, 400, "left", 11.5);
      g.save(); g.beginPath(); g.rect(GUTTER, 0, width - GUTTER - PAD, AXIS); g.clip();
      const shown = visibleSteps(), each = (width - GUTTER) / Math.max(1, shown.length);
      const every = Math.max(1, Math.round(niceStep(shown.length, Math.max(1, (width - GUTTER) / 48))));
      const isLabelled = (number) => each >= 30 || number % every === 0;
      let lastPixel = -9;
      for (const k of shown) {
        const [, a, b] = D.steps[k], x0 = Math.max(X(a), GUTTER), x1 = Math.min(Math.max(X(b), x0 + 1), width - PAD);
        if (x1 - x0 < 2 && Math.floor(x0) === lastPixel) continue;
        lastPixel = Math.floor(x0);
        g.fillStyle = k % 2 ? ink.line : ink.grid;
        g.fillRect(x0, 3, Math.max(1, x1 - x0 - (x1 - x0 > 4 ? 1 : 0)), 18);
      }
      let lastLabel = -99;
      for (const k of shown) {
        const [number, a, b] = D.steps[k], x = (Math.max(X(a), GUTTER) + Math.min(X(b), width - PAD)) / 2;
        if (!isLabelled(number) || x - lastLabel < 26) continue;
        lastLabel = x;
        label(g, String(number), x, 12.5, ink.ink, 600, "center", 11.5);
      }
      g.restore();
    }
    g.fillStyle = ink.line; g.fillRect(0, AXIS - 1, width, 1);
    if (hoverX !== null) {
      const text = instant(T(hoverX));
      g.font = `600 11.5px ${FONT}`;
      const w = g.measureText(text).width + 12, x = Math.min(Math.max(GUTTER, hoverX - w / 2), width - w - 2);
      g.fillStyle = ink.ink; g.beginPath(); g.roundRect(x, AXIS - 20, w, 18, 4); g.fill();
      label(g, text, x + w / 2, AXIS - 10.5, ink.panel, 600, "center", 11.5);
    }
    if (dragging?.kind === "axis") shade(g, AXIS);
  };

  // -- lanes -------------------------------------------------------------------------------------------------------

  const drawLanes = (g) => {
    const shownSteps = D.steps.length ? visibleSteps() : [];
    if (shownSteps.length < width / 6) for (const k of shownSteps) {
      if (k % 2 === 0) continue;
      const a = Math.max(X(D.steps[k][1]), GUTTER), b = X(D.steps[k][2]);
      g.fillStyle = ink.band; g.fillRect(a, 0, Math.max(0, Math.min(b, width - PAD) - a), height);
    }
    const [at] = ticks();
    g.fillStyle = ink.grid;
    for (const t of at) g.fillRect(Math.round(X(t)), 0, 1, height);
    for (const lane of D.lanes) {
      if (lane !== D.lanes[0]) { g.fillStyle = ink.line; g.fillRect(0, lane.y, width, 1); }
      label(g, clip(g, lane.name, width - 24, 600, 13), 12, lane.y + 16, ink.ink, 600, "left", 13);
      for (const row of lane.rows) label(g, row.label, 12, row.y + row.h / 2 + 0.5, ink.soft, 400, "left", 11.5);
      g.save(); g.beginPath(); g.rect(GUTTER, lane.y + HEAD - 6, width - GUTTER - PAD, lane.h); g.clip();
      for (const row of lane.rows) drawRow(g, row);
      if (lane.memory.y !== null) drawMemory(g, lane.memory);
      g.restore();
      if (lane.memory.y !== null) memoryLabels(g, lane.memory);
    }
    if (hoverX !== null) { g.fillStyle = ink.faint; g.globalAlpha = 0.5; g.fillRect(Math.round(hoverX), 0, 1, height); g.globalAlpha = 1; }
    for (const item of [hovered, chosen]) if (item) outline(g, item, item === chosen);
  };
  const clip = (g, text, room, weight = 400, px = 12) => {
    g.font = `${weight} ${px}px ${FONT}`;
    if (g.measureText(text).width <= room) return text;
    let low = 0, high = Math.min(text.length, 200);
    while (low < high) { const mid = (low + high + 1) >> 1; if (g.measureText(`${text.slice(0, mid)}…`).width <= room) low = mid; else high = mid - 1; }
    return low > 3 ? `${text.slice(0, low)}…` : "";
  };
  const firstVisible = (row) => firstFrom(row.latest, v0);
  const colourOf = (row, i) => {
    if (row.kind === "scope") return modeColour(D.names[row.name[i]]);
    if (row.kind === "transition" || row.kind === "rank") return row.moved[i] ? ink.moved : ink.elided;
    return row.kind === "call" ? ink.call : ink.event;
  };
  const drawRow = (g, row) => {
    const y = row.y, h = row.h, from = firstVisible(row), right = width - PAD;
    // Items narrower than a pixel share it: each colour gets as much of the row's height as it had of the pixel's time.
    let pixel = -1, lastPoint = -99;
    const parts = new Map();
    const flush = () => {
      if (!parts.size) return;
      let sum = 0;
      for (const w of parts.values()) sum += w;
      let foot = y + h;
      for (const colour of [...parts.keys()].sort((a, b) => parts.get(b) - parts.get(a))) {
        const part = Math.max(1.5, (parts.get(colour) / Math.max(1, sum)) * h), top = Math.max(y, foot - part);
        g.fillStyle = colour; g.fillRect(pixel, top, 1, foot - top);
        foot = top;
      }
      parts.clear();
    };
    for (let i = from; i < row.n && row.t0[i] <= v1; i++) {
      const x0 = X(row.t0[i]), x1 = X(row.t1[i]), w = x1 - x0;
      const isPoint = row.kind === "event" && w < 4;
      if (isPoint && !(row.flags[i] & FAILED) && Math.floor(x0) - lastPoint >= 9) { lastPoint = Math.floor(x0); flush(); pixel = -1; diamond(g, x0, y + h / 2, 4.5); continue; }
      if (w < 1.5) {
        const p = Math.floor(x0);
        if (p !== pixel) { flush(); pixel = p; }
        const colour = colourOf(row, i);
        parts.set(colour, (parts.get(colour) ?? 0) + (isPoint ? 0.15 : Math.max(w, 0.02)));
        continue;
      }
      flush(); pixel = -1;
      const a = Math.max(x0, GUTTER - 4), b = Math.min(x1, right + 4);
      bar(g, row, i, a, b, y, h);
      if (b - a > 26 && row.kind !== "rank" && row.kind !== "transition") barText(g, row, i, Math.max(a, GUTTER), Math.min(b, right), y, h);
      else if (row.kind === "transition" && b - a > 46) barText(g, row, i, Math.max(a, GUTTER), Math.min(b, right), y, h);
    }
    flush();
    // Failures last and never thinner than their mark.
    let lastMark = -99;
    for (let k = firstFrom(row.bad, from); k < row.bad.length; k++) {
      const i = row.bad[k];
      if (row.t0[i] > v1) break;
      if (row.t1[i] < v0) continue;
      const x0 = Math.max(X(row.t0[i]), GUTTER - 4), x1 = Math.min(X(row.t1[i]), right + 4);
      if (x1 < lastMark + 7 && x1 - x0 < 7) continue;
      lastMark = x1;
      if (row.kind !== "scope" || x1 - x0 < 4) { g.fillStyle = ink.bad; g.fillRect(x0, y, Math.max(2.5, x1 - x0), h); }
      else { g.strokeStyle = ink.bad; g.lineWidth = 2; g.strokeRect(x0 + 1, y + 1, x1 - x0 - 2, h - 2); }
      cross(g, x1 - x0 > 16 ? x1 - 9 : (x0 + Math.max(x1, x0 + 2.5)) / 2, y + h / 2, Math.min(h - 5, 8));
      if (row.kind !== "scope" && x1 - x0 > 60) barText(g, row, i, Math.max(x0, GUTTER), Math.min(x1 - 16, right), y, h, ink.panel);
    }
  };
  const diamond = (g, x, y, r) => {
    g.fillStyle = ink.event; g.beginPath();
    g.moveTo(x, y - r); g.lineTo(x + r, y); g.lineTo(x, y + r); g.lineTo(x - r, y); g.fill();
  };
  const bar = (g, row, i, a, b, y, h) => {
    g.fillStyle = colourOf(row, i);
    const gap = b - a > 4 ? 0.75 : 0, round = Math.min(3, (b - a) / 3);
    const isLight = row.kind === "call" || row.kind === "event";
    g.beginPath(); g.roundRect(a, y, b - a - gap, h, round);
    if (row.flags[i] & UNFINISHED) { g.globalAlpha = 0.35; g.fill(); g.globalAlpha = 1; g.setLineDash([4, 3]); g.strokeStyle = colourOf(row, i); g.lineWidth = 1.5; g.stroke(); g.setLineDash([]); return; }
    if (isLight) { g.globalAlpha = 0.28; g.fill(); g.globalAlpha = 1; g.fillRect(a, y, Math.min(2, b - a), h); return; }
    g.fill();
  };
  const barText = (g, row, i, a, b, y, h, colour) => {
    const isDark = row.kind === "scope" || row.kind === "transition";
    const isOpen = row.flags[i] & UNFINISHED;
    const ground = colour ?? (isDark && !isOpen ? ink["on-mode"] : ink.ink);
    const px = row.kind === "scope" ? 12 : 11, weight = row.kind === "scope" ? 600 : 500;
    const name = D.names[row.name[i]];
    const first = row.kind === "transition" ? (row.moved[i] ? bytes(row.moved[i]) : row.elided[i] ? `${bytes(row.elided[i])} elided` : "") : name;
    const text = clip(g, first, b - a - 12, weight, px);
    if (!text) return;
    label(g, text, a + 6, y + h / 2 + 0.5, ground, weight, "left", px);
    const used = g.measureText(text).width + 14, more = isOpen ? "unfinished" : time(row.t1[i] - row.t0[i]);
    g.font = `400 ${px}px ${FONT}`;
    if (text === first && b - a - used > g.measureText(more).width + 8) { g.globalAlpha = 0.85; label(g, more, a + used, y + h / 2 + 0.5, ground, 400, "left", px); g.globalAlpha = 1; }
  };
  const cross = (g, x, y, s) => {
    const r = s / 2 + 2.5;
    g.fillStyle = ink.panel; g.strokeStyle = ink.bad; g.lineWidth = 1.5;
    g.beginPath(); g.arc(x, y, r, 0, 7); g.fill(); g.stroke();
    const d = s / 4 + 0.4; g.beginPath(); g.moveTo(x - d, y - d); g.lineTo(x + d, y + d); g.moveTo(x + d, y - d); g.lineTo(x - d, y + d); g.stroke();
  };
  const outline = (g, [r, i], isChosen) => {
    const row = rows[r], x0 = Math.max(X(row.t0[i]), GUTTER), x1 = Math.min(X(row.t1[i]), width - PAD);
    if (x1 < GUTTER || x0 > width - PAD) return;
    g.strokeStyle = isChosen ? ink.ink : ink.soft; g.lineWidth = isChosen ? 2 : 1.25;
    g.beginPath(); g.roundRect(x0 - 1.5, row.y - 1.5, Math.max(3, x1 - x0) + 3, row.h + 3, 4); g.stroke();
  };

  // -- memory ------------------------------------------------------------------------------------------------------

  const drawMemory = (g, memory) => {
    const top = memory.y, base = top + MEMORY, scale = (MEMORY - 4) / topMemory;
    g.fillStyle = ink.line; g.fillRect(GUTTER, base, width - GUTTER - PAD, 1);
    const right = Math.min(width - PAD, X(END)), left = Math.max(GUTTER, X(memory.times[0]));
    let k = Math.max(0, firstFrom(memory.times, T(left)) - 1);
    // Moments that share a pixel are averaged over its time; a line tells the most there was on the device.
    const paint = (from, to, values, peak) => {
      let y = base, device = base;
      memory.series.forEach((series, index) => {
        const h = values[index] * scale;
        if (h <= 0) return;
        const colour = componentColour(series.component);
        g.fillStyle = series.tier === "device" ? colour : hatch(colour);
        g.fillRect(from, y - h, to - from, h);
        y -= h;
        if (series.tier === "device") device = y;
      });
      if (base - peak * scale < device - 1) { g.fillStyle = ink.ink; g.fillRect(from, base - peak * scale - 0.5, to - from, 1); }
    };
    const exact = new Float64Array(memory.series.length), mean = new Float64Array(memory.series.length);
    let x = left;
    while (x < right) {
      const next = k + 1 < memory.n ? X(memory.times[k + 1]) : right, end = Math.min(right, next);
      const whole = Math.min(right, Math.floor(x) + 1);
      if (end >= whole && Math.floor(end) > Math.floor(x)) {
        const stop = end >= right ? right : Math.floor(end);
        memory.series.forEach((series, index) => { exact[index] = series.values[k]; });
        paint(x, stop, exact, 0);
        x = stop;
        if (next <= x) k++;
        if (k >= memory.n) break;
        continue;
      }
      mean.fill(0);
      let peak = 0, at = x, merged = 0;
      while (at < whole) {
        const until = k + 1 < memory.n ? Math.min(whole, X(memory.times[k + 1])) : whole, w = Math.max(0, until - at);
        memory.series.forEach((series, index) => { mean[index] += series.values[k] * w; });
        peak = Math.max(peak, memory.device[k]);
        at = until;
        if (at >= whole) break;
        k++; merged++;
      }
      const room = Math.max(1e-9, whole - x);
      mean.forEach((value, index) => { mean[index] = value / room; });
      paint(x, whole, mean, merged > 2 ? peak : 0);
      x = whole;
    }
  };
  const memoryLabels = (g, memory) => {
    label(g, "memory", 12, memory.y + 10, ink.soft, 400, "left", 11.5);
    label(g, bytes(topMemory), GUTTER - 8, memory.y + 6, ink.faint, 400, "right", 11);
    label(g, "0", GUTTER - 8, memory.y + MEMORY - 2, ink.faint, 400, "right", 11);
  };

  // -- finding -----------------------------------------------------------------------------------------------------

  const itemAt = (x, y) => {
    const row = rows.find((r) => y >= r.y - GAP / 2 && y <= r.y + r.h + GAP / 2);
    if (!row || x < GUTTER) return null;
    const slack = ((v1 - v0) / (width - GUTTER - PAD)) * 3, t = T(x);
    let best = null, bestScore = Infinity;
    for (let i = firstFrom(row.latest, t - slack); i < row.n && row.t0[i] <= t + slack; i++) {
      if (row.t1[i] < t - slack) continue;
      const isIn = row.t0[i] <= t && t <= row.t1[i];
      const away = isIn ? 0 : Math.min(Math.abs(row.t0[i] - t), Math.abs(row.t1[i] - t));
      const score = (row.flags[i] & FAILED ? -1e15 : 0) + (isIn ? 0 : 1e9) + away + (row.t1[i] - row.t0[i]) * 1e-3;
      if (score < bestScore) { bestScore = score; best = [row.index, i]; }
    }
    return best;
  };
  const memoryAt = (x, y) => {
    const lane = D.lanes.find(({ memory }) => memory.y !== null && y >= memory.y && y <= memory.y + MEMORY);
    if (!lane || x < GUTTER) return null;
    const t = T(x), after = firstFrom(lane.memory.times, t);
    const k = lane.memory.times[after] <= t ? after : after - 1;
    return k < 0 ? null : [lane, k];
  };
  const describe = ([r, i]) => {
    const row = rows[r], us = row.t1[i] - row.t0[i], facts = [];
    const kind = { scope: "scope", transition: "transition", call: "call", event: "event", rank: row.label }[row.kind];
    const state = row.flags[i] & UNFINISHED ? "unfinished" : row.flags[i] & ROLLED_BACK ? "rolled back" : row.flags[i] & FAILED ? "failed" : "";
    if (state) facts.push(["outcome", state, "bad"]);
    facts.push(["start", `${(row.t0[i] / 1e6).toFixed(row.t0[i] < 1e9 ? 4 : 3)} s`]);
    if (us || row.kind !== "event") facts.push(["lasted", time(us) + (row.flags[i] & UNFINISHED ? " so far" : "")]);
    if (row.moved[i]) facts.push(["moved", `${bytes(row.moved[i])}${us ? `, ${three(row.moved[i] / us / 1e3)} GB/s` : ""}`]);
    if (row.elided[i]) facts.push(["elided", bytes(row.elided[i])]);
    if (row.copying[i] && row.kind === "transition") facts.push(["copying", `${time(row.copying[i])} of it`]);
    if (row.step[i] >= 0) facts.push(["step", String(row.step[i])]);
    for (const [key, text] of D.details[row.detail[i]]) facts.push([key, text, key === "error" || key === "cause" ? "bad" : ""]);
    return { title: D.names[row.name[i]], kind, policy: row.lane.name, facts };
  };
  const factList = (facts) => {
    const list = make("dl");
    for (const [key, text, mark] of facts) list.append(make("dt", {}, key), make("dd", mark ? { class: mark } : {}, text));
    return list;
  };

  // -- side --------------------------------------------------------------------------------------------------------

  const side = $("side");
  const showItem = (item) => {
    const { title, kind, policy, facts } = describe(item);
    side.replaceChildren(
      make("h2", {}, title), make("p", { class: "sub" }, `${kind} of ${policy}`), factList(facts),
      make("div", { class: "actions" },
        make("button", { type: "button", onclick: () => zoomTo(item) }, "Zoom to it"),
        make("button", { type: "button", onclick: () => choose(null) }, "Close")),
    );
    $("spoken").textContent = `${title}, ${kind} of ${policy}. ${facts.map(([key, text]) => `${key} ${text}`).join(", ")}`;
  };
  const jump = (item) => {
    const row = rows[item[0]], i = item[1], { title, policy } = describe(item);
    const isBad = row.flags[i] & (FAILED | UNFINISHED);
    const why = (D.details[row.detail[i]].find(([key]) => ["error", "cause", "message", "method"].includes(key)) ?? ["", ""])[1];
    const step = row.step[i] >= 0 ? `, step ${row.step[i]}` : "";
    return make("li", {}, make("button", { type: "button", onclick: () => { choose(item); reveal(item, true); } },
      make("span", isBad ? { class: "bad" } : {}, `${isBad ? (row.flags[i] & UNFINISHED ? "… " : "× ") : ""}${title}`),
      make("span", {}, row.kind === "event" ? `at ${time(row.t0[i])}` : time(row.t1[i] - row.t0[i])),
      make("span", { class: "note" }, isBad && why ? why : `${policy}${step}${row.moved[i] ? `, ${bytes(row.moved[i])}` : row.elided[i] ? `, ${bytes(row.elided[i])} elided` : ""}`)));
  };
  const showStart = () => {
    side.replaceChildren();
    if (trouble.length) side.append(make("h3", {}, "Failed, refused or unfinished"), make("ol", {}, ...trouble.slice(0, 8).map(jump)),
      trouble.length > 8 ? make("p", { class: "hint" }, `and ${trouble.length >= 200 ? "many" : trouble.length - 8} more: press e`) : "");
    if (slowest.length) side.append(make("h3", {}, "Slowest transitions"), make("ol", {}, ...slowest.map(jump)));
    const closing = D.lanes.filter(({ memory }) => memory.n && memory.all[memory.n - 1] > 0);
    if (closing.length) {
      side.append(make("h3", {}, D.closed ? "Memory at the end" : "Memory at the last record"));
      for (const { name, memory } of closing) {
        if (D.lanes.length > 1) side.append(make("p", { class: "who" }, name));
        const left = memory.series.map((series) => [series, series.values[memory.n - 1]]).filter(([, n]) => n);
        side.append(factList(left.map(([series, n]) => [series.component, `${bytes(n)} ${series.tier}`])));
      }
    }
    side.append(make("p", { class: "hint" }, "Click a bar to keep its details here. Press ? for keys."));
  };
  const choose = (item) => {
    chosen = item;
    if (item) showItem(item); else showStart();
    draw();
  };

  // -- view --------------------------------------------------------------------------------------------------------

  const view = (a, b) => {
    let span = Math.max(MIN_SPAN, b - a);
    span = Math.min(span, END + 2 * margin);
    const mid = (a + b) / 2;
    v0 = Math.min(Math.max(mid - span / 2, -margin), END + margin - span);
    v1 = v0 + span;
    draw();
  };
  const zoom = (factor, at = (v0 + v1) / 2) => view(at - (at - v0) * factor, at + (v1 - at) * factor);
  const pan = (part) => view(v0 + (v1 - v0) * part, v1 + (v1 - v0) * part);
  const zoomTo = ([r, i]) => { const a = rows[r].t0[i], b = rows[r].t1[i], w = Math.max(b - a, 50); view(a - w * 0.25, b + w * 0.25); };
  const reveal = ([r, i], isClose = false) => {
    const a = rows[r].t0[i], b = rows[r].t1[i], w = Math.max(b - a, 50), span = v1 - v0;
    if (isClose && (b - a) / span < 0.02) view(a - w * 8, b + w * 8);
    else if (a < v0 || b > v1) { const s = Math.max(span, w * 1.2); view((a + b - s) / 2, (a + b + s) / 2); }
  };

  let order = null;
  const ordered = () => {
    if (!order) {
      order = [];
      for (const row of rows) if (row.kind !== "rank") for (let i = 0; i < row.n; i++) order.push([row.index, i]);
      order.sort((p, q) => rows[p[0]].t0[p[1]] - rows[q[0]].t0[q[1]] || p[0] - q[0]);
    }
    return order;
  };
  const stepTo = (direction, isWanted) => {
    const all = ordered();
    let k;
    if (chosen) k = all.findIndex(([r, i]) => r === chosen[0] && i === chosen[1]) + direction;
    else { k = all.findIndex(([r, i]) => rows[r].t0[i] >= v0); if (k < 0) k = 0; }
    for (let n = 0; n < all.length; n++, k += direction) {
      const item = all[((k % all.length) + all.length) % all.length];
      if (isWanted(item)) { choose(item); reveal(item); return; }
    }
  };
  const isBad = ([r, i]) => Boolean(rows[r].flags[i] & (FAILED | UNFINISHED));
  const does = {
    in: () => zoom(0.6), out: () => zoom(1 / 0.6), fit: () => view(-margin, END + margin), help: () => $("help").showModal(),
    trouble: () => stepTo(1, isBad),
  };
  for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", () => does[button.dataset.do]());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
    const isButton = event.target instanceof HTMLButtonElement || event.target instanceof HTMLElement && event.target.tagName === "SUMMARY";
    if (isButton && (event.key === "Enter" || event.key === " ")) return;
    const keys = {
      ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), "+": does.in, "=": does.in, "-": does.out, "0": does.fit, "?": does.help,
      j: () => stepTo(1, () => true), k: () => stepTo(-1, () => true), e: () => stepTo(1, isBad), E: () => stepTo(-1, isBad),
      f: () => chosen && zoomTo(chosen), Escape: () => choose(null),
    };
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  });

  // -- mouse -------------------------------------------------------------------------------------------------------

  let dragging = null;
  const tip = $("tip");
  const place = (event, canvas) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  const showTip = (event, title, facts) => {
    tip.replaceChildren(make("strong", {}, title), factList(facts.slice(0, 9)));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 12 : event.clientX + 14;
    const y = event.clientY + 16 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 16;
    tip.style.left = `${Math.max(4, x)}px`; tip.style.top = `${Math.max(4, y)}px`;
  };
  const hover = (event) => {
    const [x, y] = place(event, lanes);
    hoverX = x >= GUTTER && x <= width - PAD ? x : null;
    hovered = itemAt(x, y);
    const memory = hovered ? null : memoryAt(x, y);
    lanes.classList.toggle("over", Boolean(hovered));
    if (hovered) { const { title, kind, policy, facts } = describe(hovered); showTip(event, `${title}`, [[kind, policy], ...facts]); }
    else if (memory) {
      const [lane, k] = memory;
      const facts = lane.memory.series.filter((series) => series.values[k]).map((series) => [series.component, `${bytes(series.values[k])} on the ${series.tier}`]);
      showTip(event, `${lane.name}: ${bytes(lane.memory.device[k])} on the device`, facts);
    } else tip.hidden = true;
    draw();
  };
  const leave = () => { tip.hidden = true; hovered = hoverX = null; draw(); };
  lanes.addEventListener("pointerleave", leave);
  lanes.addEventListener("pointermove", (event) => {
    if (dragging?.kind === "pan") {
      const [x] = place(event, lanes), away = x - dragging.x0;
      if (Math.abs(away) > 3) dragging.hasMoved = true;
      const by = (away / (width - GUTTER - PAD)) * (dragging.v1 - dragging.v0);
      if (dragging.hasMoved) { tip.hidden = true; hovered = null; view(dragging.v0 - by, dragging.v1 - by); }
      return;
    }
    hover(event);
  });
  lanes.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const [x] = place(event, lanes);
    dragging = { kind: "pan", x0: x, v0, v1, hasMoved: false };
    lanes.setPointerCapture(event.pointerId);
    lanes.classList.add("drag");
  });
  lanes.addEventListener("pointerup", (event) => {
    const was = dragging;
    dragging = null;
    lanes.classList.remove("drag");
    if (was?.kind === "pan" && !was.hasMoved) { const [x, y] = place(event, lanes); choose(itemAt(x, y)); }
  });
  lanes.addEventListener("dblclick", (event) => { const item = itemAt(...place(event, lanes)); if (item) { choose(item); zoomTo(item); } });
  stage.addEventListener("wheel", (event) => {
    const [x] = place(event, lanes);
    if (x < GUTTER || event.ctrlKey && !event.deltaY) return;  // over the labels the page scrolls
    event.preventDefault();
    const dy = event.deltaMode ? event.deltaY * 30 : event.deltaY, dx = event.deltaMode ? event.deltaX * 30 : event.deltaX;
    if (event.shiftKey || Math.abs(dx) > Math.abs(dy)) pan((event.shiftKey && !dx ? dy : dx) / 900);
    else zoom(Math.exp(Math.max(-120, Math.min(120, dy)) * 0.0028), T(x));
  }, { passive: false });
  const choosesRange = (canvas, kind, toTime) => {
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      const [x] = place(event, canvas);
      dragging = { kind, x0: Math.max(GUTTER, x), x1: x };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (dragging?.kind !== kind) return;
      dragging.x1 = Math.min(width - PAD, Math.max(GUTTER, place(event, canvas)[0]));
      draw();
    });
    canvas.addEventListener("pointerup", () => {
      if (dragging?.kind !== kind) return;
      const { x0, x1 } = dragging;
      dragging = null;
      const a = toTime(Math.min(x0, x1)), b = toTime(Math.max(x0, x1));
      if (Math.abs(x1 - x0) > 3) view(a, b);
      else if (kind === "overview") view(a - (v1 - v0) / 2, a + (v1 - v0) / 2);
      else draw();
    });
    canvas.addEventListener("pointercancel", () => { dragging = null; draw(); });
    canvas.addEventListener("dblclick", does.fit);
  };
  choosesRange(overview, "overview", OT);
  choosesRange(axis, "axis", T);

  // -- page --------------------------------------------------------------------------------------------------------

  const swatch = (paint) => {
    const canvas = make("canvas", { "aria-hidden": "true" }), ratio = devicePixelRatio || 1;
    canvas.width = 14 * ratio; canvas.height = 10 * ratio;
    const g = canvas.getContext("2d"); g.scale(ratio, ratio); paint(g);
    return canvas;
  };
  const key = (paint, text) => make("span", { class: "key" }, swatch(paint), text);
  const box = (colour) => (g) => { g.fillStyle = colour; g.beginPath(); g.roundRect(0, 0, 14, 10, 2.5); g.fill(); };
  const drawLegend = () => {
    const has = (kind, test = () => true) => rows.some((row) => row.kind === kind && row.name.some((_, i) => test(row, i)));
    const modes = MODES.filter((mode) => has("scope", (row, i) => D.names[row.name[i]] === mode));
    const group = (...keys) => make("span", { class: "group" }, ...keys.filter(Boolean));
    $("legend").replaceChildren(
      modes.length ? group(...modes.map((mode) => key(box(ink[mode]), mode))) : "",
      group(key(box(ink.moved), "moved"), has("transition", (row, i) => !row.moved[i]) && key(box(ink.elided), "nothing copied"),
        rows.some((row) => row.bad.length) && key((g) => cross(g, 7, 5, 5), "failed"),
        total.unfinished && key((g) => { g.strokeStyle = ink.soft; g.setLineDash([3, 2]); g.strokeRect(1, 1, 12, 8); }, "unfinished")),
      components.length ? group(...components.map((name) => key(box(componentColour(name)), name)),
        tiers.has("host") && key((g) => { g.fillStyle = hatch(ink.soft); g.fillRect(0, 0, 14, 10); }, "on the host")) : "",
    );
  };
  const figure = (name, value, unit = "", mark = "") => make("div", mark ? { class: mark } : {}, make("dt", {}, name), make("dd", {}, value, unit ? make("small", {}, ` ${unit}`) : null));
  const split = (text) => { const at = text.indexOf(" "); return at < 0 || /\d/.test(text.slice(at)) ? [text, ""] : [text.slice(0, at), text.slice(at + 1)]; };
  const drawHeader = () => {
    const started = D.start_ms ? new Date(D.start_ms).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" }) : "";
    const state = D.closed ? (D.error ? ["bad", `ended by ${D.error}`] : ["good", "ended normally"]) : ["warn", "no end recorded"];
    const sources = Object.keys(D.sources).length;
    $("run").append(
      make("span", {}, "run ", make("code", { title: D.run_id }, String(D.run_id).slice(0, 12))), make("span", {}, started),
      make("span", {}, `${D.num_records.toLocaleString("en")} records${sources > 1 ? ` from ${sources} sources` : ""}`),
      ...(D.release ? [make("span", {}, `release ${D.release}`)] : []), ...(D.device_budget ? [make("span", {}, `device budget ${bytes(D.device_budget)}`)] : []),
      make("span", { class: `chip ${state[0]}` }, state[1]));
    $("totals").append(
      figure("duration", ...split(time(END))), figure("transitions", total.transitions.toLocaleString("en")),
      figure("moved", ...split(bytes(total.moved))), figure("elided", ...split(bytes(total.elided))),
      figure("of the time moving", share(total.moving / END)),
      ...(total.failed ? [figure("failed", total.failed.toLocaleString("en"), "", "bad")] : []),
      ...(total.rejected ? [figure("refused calls", total.rejected.toLocaleString("en"), "", "bad")] : []),
      ...(total.warnings ? [figure("warnings", total.warnings.toLocaleString("en"))] : []));
    $("notes").append(...D.notes.map((note) => make("p", {}, note)));
    document.querySelector("[data-do=trouble]").hidden = !trouble.length;
  };
  const table = (caption, columns, body) => make("table", {}, make("caption", {}, caption),
    make("thead", {}, make("tr", {}, ...columns.map(([name, isNumber]) => make("th", { scope: "col", ...(isNumber ? { class: "n" } : {}) }, name)))),
    make("tbody", {}, ...body.map((cells) => make("tr", {}, ...cells.map((cell, k) => make("td", columns[k][1] ? { class: "n" } : {}, cell))))));
  const drawTables = () => {
    const sorted = (map) => [...map].map(([name, entry]) => [...JSON.parse(name), entry]).sort((a, b) => b[2].us - a[2].us);
    const content = make("div", { class: "scroll" });
    content.append(
      table("Transitions", [["policy"], ["from and to"], ["number", 1], ["time", 1], ["moved", 1], ["elided", 1], ["throughput", 1], ["failed", 1]],
        sorted(byMove).map(([who, name, e]) => [who, name, String(e.n), time(e.us), e.moved ? bytes(e.moved) : "-", e.elided ? bytes(e.elided) : "-", e.moved && e.us ? `${three(e.moved / e.us / 1e3)} GB/s` : "-", String(e.failed)])),
      table("Scopes", [["policy"], ["mode"], ["number", 1], ["time", 1]], sorted(byMode).map(([who, name, e]) => [who, name, String(e.n), time(e.us)])),
      table("Calls", [["policy"], ["method"], ["number", 1], ["time", 1], ["failed", 1]], sorted(byCall).map(([who, name, e]) => [who, name, String(e.n), time(e.us), String(e.failed)])));
    $("tables").append(make("details", {}, make("summary", {}, "Totals as tables"), content));
  };

  readInk(); layOut(); drawHeader(); drawLegend(); drawTables(); choose(null);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readInk(); drawLegend(); draw(); });
  new ResizeObserver(draw).observe(stage);
  drawNow();
})();
