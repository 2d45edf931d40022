"use strict";
// Shows wirings and values. All data is in the element #runs, in data-chart of each plot and in data-matrix of each matrix.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const LEVELS = 8;
  const runs = JSON.parse(document.getElementById("runs").textContent);
  const tip = document.getElementById("tip");
  const touch = matchMedia("(pointer: coarse)");

  const make = (name, attributes, parent, text) => {
    const node = document.createElementNS(SVG, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  };
  const add = (name, parent, text) => {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  };

  // Adds to a run what the script needs: the layer and branch of every block, and its candidates.
  function prepare(run) {
    run.layer = []; run.branch = []; run.starts = [];
    run.sizes.forEach((size, layer) => {
      run.starts.push(run.layer.length);
      for (let branch = 0; branch < size; branch++) { run.layer.push(layer); run.branch.push(branch); }
    });
    run.first = run.sizes[0];
    run.count = run.layer.length;
    run.range = Math.max(1, run.done);
    run.edges = run.fan_in.reduce((a, b) => a + b, 0);
    run.decoded = new Map();
    run.candidates ??= run.layer.map((layer, k) => {
      const end = run.starts[layer], first = run.layered && layer ? run.starts[layer - 1] : 0;
      return Array.from({ length: layer ? end - first : 0 }, (_, i) => first + i);
    });
    return run;
  }

  function frameAt(run, epoch) {
    let found = 0;
    while (found + 1 < run.frames.length && run.frames[found + 1][0] <= epoch) found++;
    if (!run.decoded.has(found)) run.decoded.set(found, { number: found, epoch: run.frames[found][0], ...decode(run, run.frames[found]) });
    return run.decoded.get(found);
  }

  const later = window.requestIdleCallback ?? (task => setTimeout(task, 50));

  const unpack = text => new DataView(Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer);

  function decode(run, [, packed, others]) {
    const view = unpack(packed), rest = others ? unpack(others) : null;
    const sources = [], values = [], readers = Array.from({ length: run.count }, () => []);
    let at = 0;
    for (let k = 0; k < run.count; k++) {
      sources.push([]); values.push([]);
      for (let i = 0; i < run.fan_in[k]; i++, at += 4) {
        sources[k].push(view.getUint16(at, true));
        values[k].push(view.getUint16(at + 2, true) / 65535);
        readers[sources[k][i]].push(k);
      }
    }
    let next = 0;
    const rejected = rest && run.candidates.map((row, k) => {
      const chosen = new Set(sources[k]);
      return row.filter(s => !chosen.has(s)).map(s => [s, rest.getUint16(2 * next++, true) / 65535]);
    });
    return { sources, values, readers, rejected, alive: reaching(run, sources), sure: !run.learned };
  }

  const feedsOutput = (run, k) => run.all_out || run.layer[k] === run.sizes.length - 1;

  // Which blocks can reach the output.
  function reaching(run, sources) {
    const alive = new Array(run.count).fill(false);
    for (let k = run.count - 1; k >= 0; k--) {
      if (feedsOutput(run, k)) alive[k] = true;
      if (alive[k]) for (const s of sources[k]) alive[s] = true;
    }
    return alive;
  }

  // The same lines as scene.py draws.
  function curve(run, s, k) {
    const half = run.side >> 1, x1 = run.xs[s], y1 = run.ys[s], x2 = run.xs[k], y2 = run.ys[k];
    if (run.layered) return `M${x1} ${y1 + half}L${x2} ${y2 - half}`;
    if (k - s === 1) return `M${x1} ${y1 + half}V${y2 - half}`;
    const edge = x1 + (run.wide >> 1), bulge = run.bulges[k - s], out = edge + bulge;
    if (run.bends.length) {
      const points = run.bends.map(([far, on]) => `L${Math.floor(edge + bulge * far + 0.5)} ${Math.floor(y1 + (y2 - y1) * on + 0.5)}`);
      return `M${edge} ${y1}${points.join("")}L${edge} ${y2}`;
    }
    return `M${edge} ${y1}C${out} ${y1} ${out} ${y2} ${edge} ${y2}`;
  }

  const named = run => run.kinds.length > 0;  // whether blocks have kinds, such as conv3x3
  const unit = run => named(run) ? "layer" : "module";
  const name = (run, k) => run.layered ? `branch ${run.branch[k]} of ${unit(run)} ${run.layer[k]}` : `block ${k}`;
  const title = (run, k) => named(run) ? `${run.kinds[k]}, ${name(run, k)}` : name(run, k);
  const short = (run, k) => (named(run) ? `${run.kinds[k]} ` : "") + (run.layered ? `${run.branch[k]}` : `${k}`);

  function stage(svg, run, [thin, light], width = run.width) {
    svg.setAttribute("viewBox", `0 0 ${width} ${run.height}`);
    svg.setAttribute("width", width);
    svg.classList.add("wires");
    make("path", { class: "end", d: run.ends }, svg);
    make("text", { x: run.middle, y: 10, class: "x" }, svg, "input");
    make("text", { x: run.middle, y: run.height - 2, class: "x" }, svg, "output");
    run.starts.forEach((k, layer) => { if (layer % run.every === 0) make("text", { x: 30, y: run.ys[k] + 4, class: "y" }, svg, layer); });
    const base = make("g", { class: "base" }, svg);
    const levels = Array.from({ length: LEVELS }, (_, i) => make("path", {
      "stroke-opacity": ((0.3 + 0.65 * (i + 1) / LEVELS) * light).toFixed(2),
      "stroke-width": ((1 + 1.2 * (i + 1) / LEVELS) * thin).toFixed(2),
    }, base));
    const lost = make("path", { class: "lost", "stroke-opacity": 0.4 * light, "stroke-width": (1.1 * thin).toFixed(2) }, base);
    return { levels, lost };
  }

  function blocks(svg, run) {
    const half = run.side >> 1, across = run.wide >> 1;
    const all = make("g", {}, svg);
    return Array.from({ length: run.count }, (_, k) => {
      const group = make("g", { class: "block", "data-k": k, tabindex: k ? -1 : 0, role: "button", "aria-label": title(run, k) }, all);
      make("rect", { x: run.xs[k] - across, y: run.ys[k] - half, width: run.wide, height: run.side,
        rx: Math.max(2, Math.floor(run.side / 6)) }, group);
      if (named(run)) make("text", { x: run.xs[k], y: run.ys[k] + 4, class: "x" }, group, run.kinds[k]);
      return group;
    });
  }

  // The connections of a frame as a few paths, one per shade: thousands of elements would be slow.
  function pathsOf(run, frame) {
    if (frame.paths) return frame.paths;
    const levels = Array.from({ length: LEVELS }, () => []), lost = [];
    for (let k = 0; k < run.count; k++) {
      const sources = frame.sources[k], values = frame.values[k], count = sources.length;
      for (let i = 0; i < count; i++) {
        const strength = frame.sure ? 1 : 1 - (1 - values[i]) ** count;  // as in wires.py
        const level = Math.max(0, Math.ceil(strength * LEVELS - 0.01) - 1);
        (frame.alive[k] ? levels[level] : lost).push(curve(run, sources[i], k));
      }
    }
    return frame.paths = { levels: levels.map(part => part.join("")), lost: lost.join("") };
  }

  function show(run, frame, layer) {
    const paths = pathsOf(run, frame);
    paths.levels.forEach((d, i) => layer.levels[i].setAttribute("d", d));
    layer.lost.setAttribute("d", paths.lost);
  }

  // The wiring of the plain network.
  function usual(svg, run) {
    const { look, sources } = run.plain;
    const layer = stage(svg, run, look, run.layered ? run.width : 2 * run.middle);
    const frame = { sources, values: sources.map(row => row.map(() => 1 / row.length)), sure: true };
    const full = run.layered && sources[run.count - 1].length === run.sizes.at(-2);
    frame.alive = reaching(run, frame.sources);
    if (full && run.first > 16) {  // too many lines to see: an area instead
      const half = run.side >> 1, d = run.starts.slice(1).map((k, i) => {
        const s = run.starts[i], left = run.xs[s], right = run.xs[k - 1], end = run.starts[i + 2] ?? run.count;
        return `M${left} ${run.ys[s] + half}H${right}L${run.xs[end - 1]} ${run.ys[k] - half}H${run.xs[k]}z`;
      });
      make("path", { class: "all", d: d.join("") }, svg);
    } else show(run, frame, layer);
    blocks(svg, run).forEach((block, k) => {
      block.classList.toggle("unused", !frame.alive[k]);
      for (const key of ["tabindex", "role", "aria-label"]) block.removeAttribute(key);
    });
  }

  function closure(start, next) {
    const seen = new Set([start]), todo = [start];
    while (todo.length) for (const k of next[todo.pop()]) if (!seen.has(k)) { seen.add(k); todo.push(k); }
    seen.delete(start);
    return seen;
  }

  function player(root) {
    const run = prepare(runs[root.dataset.player]);
    const svg = root.querySelector(".wiring"), panel = root.querySelector(".panel"), count = root.querySelector(".count");
    const input = root.querySelector("input"), output = root.querySelector("output"), play = root.querySelector(".play");
    if (!run.frames.length) { count.textContent = "There are no connections to show."; return; }
    const beside = root.querySelector(".usual");
    if (beside) usual(beside, run);
    root.classList.toggle("wideview", run.width > 500);
    root.classList.toggle("named", named(run));
    const layer = stage(svg, run, run.wiring);
    const up = make("path", { class: "up", "stroke-width": 2 }, svg), down = make("path", { class: "down", "stroke-width": 2 }, svg);
    const squares = blocks(svg, run);
    let epoch = run.done, frame = null, picked = null, pointed = null, focused = null, drawn = null, unfolded = null;

    function render() {
      frame = frameAt(run, epoch);
      if (frame !== drawn) {
        show(run, frame, layer);
        squares.forEach((square, k) => square.classList.toggle("unused", !frame.alive[k]));
        drawn = frame;
        const next = run.frames[frame.number + 1];
        if (next) later(() => pathsOf(run, frameAt(run, next[0])));  // ready before the slider gets there
      }
      const used = frame.alive.filter(Boolean).length;
      const all = run.all_out ? " The output reads every block." : "";
      count.textContent = `${run.edges.toLocaleString("en")} connections; ${used} of ${run.count} blocks reach the output.${all}`;
      svg.dataset.frame = frame.number;
      svg.dataset.epoch = epoch;
      if (output) {
        const phase = run.phases.find(([, start, end]) => epoch <= end && (epoch > start || start === 0));
        const older = (run.freeze === null || epoch <= run.freeze) && frame.epoch !== epoch ? ` (wiring of epoch ${frame.epoch})` : "";
        const state = (run.freeze === null || epoch < run.freeze ? "learning" : "wiring frozen") + older;
        output.textContent = `epoch ${epoch} of ${run.epochs}: ${state}`;
        input.setAttribute("aria-valuetext", `epoch ${epoch}, phase ${phase ? phase[0] : ""}, ${state}`);
      }
      mark();
    }

    // Marks the blocks that the current block reads and those that read it; if it is picked, all blocks before and after it.
    function mark() {
      const k = picked ?? pointed ?? focused, far = picked !== null;
      const ups = k === null ? new Set() : far ? closure(k, frame.sources) : new Set(frame.sources[k]);
      const downs = k === null ? new Set() : far ? closure(k, frame.readers) : new Set(frame.readers[k]);
      const into = far ? [k, ...ups] : k === null ? [] : [k], outof = far ? [k, ...downs] : k === null ? [] : [k];
      up.setAttribute("d", into.flatMap(t => frame.sources[t].map(s => curve(run, s, t))).join(""));
      down.setAttribute("d", outof.flatMap(s => frame.readers[s].map(t => curve(run, s, t))).join(""));
      svg.classList.toggle("picked", k !== null);
      squares.forEach((square, i) => {
        square.classList.toggle("isup", ups.has(i));
        square.classList.toggle("isdown", downs.has(i));
        square.classList.toggle("here", i === k);
      });
      panel.replaceChildren();
      if (k === null) { add("p", panel, touch.matches ? "Tap a block." : "Point at a block, or click it."); return; }
      add("h4", panel, named(run) ? run.kinds[k] : name(run, k));
      if (named(run)) add("p", panel, name(run, k));
      if (run.parameters.length) add("p", panel, `${run.parameters[k].toLocaleString("en")} parameters`);
      if (!frame.alive[k]) add("p", panel, "It cannot reach the output, so pruning removes it.");
      if (far) add("p", panel, `Blocks before it: ${ups.size}. Blocks after it: ${downs.size}.`);
      list(k, "Reads", frame.sources[k], frame.values[k]);
      others(k);
      list(k, "Read by", frame.readers[k]);
    }

    // The candidates that a block does not read, folded if there are many.
    function others(k) {
      const left = run.candidates[k].length - frame.sources[k].length;
      if (!run.learned || !left) return;
      const title = `${left} rejected candidate${left > 1 ? "s" : ""}`;
      if (!frame.rejected) { add("p", panel, `${title} (mask values: at the last epoch)`); return; }
      const box = add("details", panel);
      add("summary", box, title);
      box.open = unfolded ?? left <= 6;
      box.addEventListener("toggle", () => { if (box.isConnected && box.open !== (unfolded ?? left <= 6)) unfolded = box.open; });
      const ul = add("ul", box);
      for (const [s, value] of [...frame.rejected[k]].sort((a, b) => b[1] - a[1])) {
        const li = add("li", ul);
        add("span", li, short(run, s));
        add("b", li, value.toFixed(3));
      }
    }

    function list(k, title, members, values) {
      const where = run.layered && members.length ? ` branches of ${unit(run)} ${run.layer[members[0]]}` : "";
      add("p", panel, members.length ? title + where : title === "Reads" ? "Reads the input" : feedsOutput(run, k) ? "Feeds the output" : "No block reads it");
      if (!members.length) return;
      const ul = add("ul", panel);
      const order = members.map((_, i) => i).sort((a, b) => values ? values[b] - values[a] : a - b);
      for (const i of order.slice(0, 24)) {
        const li = add("li", ul);
        add("span", li, short(run, members[i]));
        if (values && run.learned) add("b", li, values[i].toFixed(3));
      }
      if (order.length > 24) add("li", ul, `and ${order.length - 24} more`);
    }

    const at = event => { const block = event.target.closest(".block"); return block ? Number(block.dataset.k) : null; };
    svg.addEventListener("pointerover", event => { pointed = at(event); if (picked === null) mark(); });
    svg.addEventListener("pointerleave", () => { pointed = null; if (picked === null) mark(); });
    svg.parentNode.addEventListener("focusin", event => { focused = event.target.matches(":focus-visible") ? at(event) : null; if (picked === null) mark(); });
    svg.parentNode.addEventListener("focusout", () => { focused = null; if (picked === null) mark(); });
    svg.addEventListener("click", event => { const k = at(event); picked = k === picked ? null : k; mark(); });
    svg.addEventListener("keydown", event => {
      const k = at(event);
      if (k === null) return;
      if (event.key === "Enter" || event.key === " ") picked = k === picked ? null : k;
      else if (event.key === "Escape") picked = null;
      else {
        const to = neighbor(run, k, event.key);
        if (to === null) return;
        squares[k].tabIndex = -1; squares[to].tabIndex = 0; squares[to].focus();
        if (picked !== null) picked = to;
      }
      event.preventDefault();
      mark();
    });

    if (input) {
      const phases = root.querySelector(".phases");
      for (const [label, start, end] of run.phases.filter(phase => phase[1] < run.range)) {
        const span = add("span", phases, label);
        span.title = label;
        span.style.left = `${100 * start / run.range}%`;
        span.style.width = `${100 * (Math.min(end, run.range) - start) / run.range}%`;
      }
      if (run.freeze !== null && run.freeze <= run.range) {
        const moment = add("i", phases);
        moment.style.left = `${100 * run.freeze / run.range}%`;
        moment.classList.toggle("left", run.freeze > 0.6 * run.range);
      }
      input.addEventListener("input", () => { stop(); epoch = Number(input.value); render(); });
      let timer = null;
      const stop = () => { clearInterval(timer); timer = null; play.textContent = "▶"; play.setAttribute("aria-label", "Play training"); };
      root.stop = stop;
      play.addEventListener("click", () => {
        if (timer) return stop();
        if (epoch >= run.done) epoch = 0;
        play.textContent = "❚❚"; play.setAttribute("aria-label", "Pause");
        const step = () => { input.value = epoch; render(); if (epoch >= run.done) stop(); else epoch++; };
        step();
        timer = setInterval(step, Math.max(90, Math.min(400, 12000 / run.range)));
      });
    }
    render();
    for (const view of root.querySelectorAll(".view")) view.scrollLeft = (view.scrollWidth - view.clientWidth) / 2;  // input and output
  }

  function neighbor(run, k, key) {
    const layer = run.layer[k], branch = run.branch[k];
    const row = { ArrowUp: layer - 1, ArrowDown: layer + 1 }[key];
    if (row !== undefined) return run.sizes[row] ? run.starts[row] + Math.min(branch, run.sizes[row] - 1) : null;
    if (key === "Home") return 0;
    if (key === "End") return run.count - 1;
    const to = { ArrowLeft: branch - 1, ArrowRight: branch + 1 }[key];
    return to >= 0 && to < run.sizes[layer] ? run.starts[layer] + to : null;
  }

  // The tip is shared: `owner` is the chart or matrix that shows it, and only this one hides it.
  let owner = null;
  const hush = svg => { if (owner === svg) say(svg, []); };

  // Shows rows of text, each with the path of its line or without.
  function say(svg, rows, x, y) {
    owner = svg;
    tip.replaceChildren();
    tip.hidden = !rows.length;
    if (!rows.length) return;
    for (const [text, line] of rows) {
      const row = add("div", tip);
      if (line) make("svg", { viewBox: "0 0 22 10", "aria-hidden": true }, row).append(line);
      add("span", row, text);
    }
    const { clientWidth, clientHeight } = document.documentElement;
    const below = y + 16 + tip.offsetHeight <= clientHeight;
    tip.style.left = `${Math.max(4, Math.min(x + 14, clientWidth - tip.offsetWidth - 4)) + window.scrollX}px`;
    tip.style.top = `${Math.max(4, below ? y + 16 : y - 8 - tip.offsetHeight) + window.scrollY}px`;
  }

  function plot(svg) {
    const data = JSON.parse(svg.dataset.chart), cross = make("path", { class: "cross" }, svg), marks = make("path", { class: "marks" }, svg);
    const lines = [...svg.querySelectorAll(".line")];
    const sample = i => { const line = lines[i].cloneNode(); line.setAttribute("d", "M1 5H21"); return line; };
    let at = data.x.length - 1;
    const point = (x, y) => {
      const rows = data.name.map((name, i) => [`${name}: ${data.y[i][at]}`, sample(i)]).filter((_, i) => data.y[i][at] !== null);
      cross.setAttribute("d", `M${data.at[at]} 20V210`);
      marks.setAttribute("d", data.places.filter(row => row[at] !== null).map(row => `M${data.at[at]} ${row[at]}h0`).join(""));
      say(svg, [[`${svg.dataset.x} ${data.x[at]}`], ...rows], x, y);
    };
    const leave = () => { cross.removeAttribute("d"); marks.removeAttribute("d"); hush(svg); };
    const follow = event => {
      const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * 460 / box.width;
      at = data.at.reduce((best, value, i) => Math.abs(value - x) < Math.abs(data.at[best] - x) ? i : best, 0);
      point(event.clientX, event.clientY);
    };
    svg.addEventListener("pointermove", follow);
    svg.addEventListener("pointerdown", follow);
    svg.addEventListener("pointerleave", event => { if (event.pointerType !== "touch") leave(); });  // a tap stays
    svg.addEventListener("blur", leave);
    document.addEventListener("pointerdown", event => { if (!svg.contains(event.target)) leave(); }, true);
    const walk = step => {
      at = Math.max(0, Math.min(data.x.length - 1, at + step));
      const box = svg.getBoundingClientRect();
      point(box.left + data.at[at] * box.width / 460, box.top + 20);
    };
    svg.addEventListener("focus", () => { if (svg.matches(":focus-visible")) walk(0); });
    svg.addEventListener("keydown", event => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") leave();
      if (!step) return;
      walk(step);
      event.preventDefault();
    });
  }

  function matrix(svg) {
    const { margin, cell, names, cells } = JSON.parse(svg.dataset.matrix);
    const counts = new Map();
    for (let i = 0; i < cells.length; i += 3) counts.set(`${cells[i]},${cells[i + 1]}`, cells[i + 2]);
    const follow = event => {
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const p = Math.floor(((event.clientX - box.left) * scale - margin) / cell);
      const t = Math.floor(((event.clientY - box.top) * scale - margin) / cell);
      const inside = p >= 0 && t >= 0 && p < names.length && t < names.length;
      const rows = [[`true: ${names[t]}`], [`predicted: ${names[p]}`], [`${counts.get(`${t},${p}`) ?? 0} images`]];
      say(svg, inside ? rows : [], event.clientX, event.clientY);
    };
    svg.addEventListener("pointermove", follow);
    svg.addEventListener("pointerdown", follow);
    svg.addEventListener("pointerleave", event => { if (event.pointerType !== "touch") hush(svg); });
    document.addEventListener("pointerdown", event => { if (!svg.contains(event.target)) hush(svg); }, true);
  }

  // A run is drawn when it is first shown.
  const alive = new Set();
  function choose(number) {
    document.querySelectorAll(".run").forEach((section, i) => { section.hidden = i !== number; });
    document.querySelectorAll(".player").forEach(root => root.stop?.());
    if (alive.has(number)) return;
    alive.add(number);
    const section = document.querySelector(`.run[data-run="${number}"]`);
    section.querySelectorAll(".player").forEach(player);
    section.querySelectorAll(".plot").forEach(plot);
    section.querySelectorAll(".matrix").forEach(matrix);
  }
  const select = document.getElementById("choose");
  if (select) select.addEventListener("change", () => choose(Number(select.value)));
  document.querySelectorAll("section:not(.run) .plot").forEach(plot);
  choose(select ? Number(select.value) : 0);
})();
