// The page of a run. The page shows the newest frame (ps/dashboard/history.py) and keeps nothing, so a page that is opened late
// shows the same.
// Members choose their names, so names reach the page as text, never as markup.
"use strict";

const $ = (id) => document.getElementById(id);
const LEVELS = "0123456789abcdefghijklmnopqrstuvwxyz";
const WARN = ["died", "restart", "lost", "refused", "dropped", "disk", "damaged", "void", "long", "against", "discarded", "hyper", "stranger", "skipped"];
const COLORS = ["--compute", "--encode", "--wait", "--line", "--faint"];

const scaled = (value, units, base = 1000) => {
  let unit = 0;
  while (value >= base && unit < units.length - 1) { value /= base; unit += 1; }
  return `${value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toPrecision(3)} ${units[unit]}`.trim();
};
const count = (value) => scaled(value, ["", "k", "M", "G"]);
const whole = (value) => value.toLocaleString("en-US", { maximumSignificantDigits: Math.max(3, Math.floor(Math.log10(value || 1)) + 1) });
const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB"]);
const rate = (value) => (value ? scaled(value * 8, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"]) : "–");
const brief = (s) => (s >= 1 ? `${s.toPrecision(3)} s` : s >= 1e-3 ? `${(s * 1e3).toPrecision(3)} ms` : s ? `${(s * 1e6).toFixed(0)} µs` : "–");
const long = (s) => {
  const [h, m, rest] = [Math.floor(s / 3600), Math.floor((s % 3600) / 60), Math.floor(s % 60)];
  return `${h ? `${h}:${String(m).padStart(2, "0")}` : m}:${String(rest).padStart(2, "0")}`;
};

let colors = {};
const readColors = () => {
  const style = getComputedStyle(document.documentElement);
  colors = Object.fromEntries(COLORS.map((name) => [name.slice(2), style.getPropertyValue(name).trim()]));
};

const put = (node, text) => { if (node.textContent !== text) node.textContent = text; };

function element(name, parent, className = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  parent.append(made);
  return made;
}

// The run.

function showRun(frame) {
  const { run } = frame, each = frame.samples_rate ?? frame.steps_rate;
  put($("name"), run.name || "Narrows");
  put($("mode"), run.summary || [run.mode, run.compress].filter(Boolean).join(", "));
  const tiles = [
    ["clock", whole(frame.clock)],
    ["loss", frame.loss === null ? "–" : frame.loss.toPrecision(4)],
    [frame.samples_rate === null ? "steps/s" : "samples/s", each ? whole(each) : "–"],
    ["workers", run.workers > frame.live ? `${frame.live} of ${run.workers}` : String(frame.live)],
    frame.left_seconds === null ? ["running for", long(frame.seconds)] : ["time left", long(frame.left_seconds)],
    ["pushed", bytes(frame.bytes_up)],
    ["pulled", bytes(frame.bytes_down)],
    ["less than fp32", frame.ratio ? `${frame.ratio >= 10 ? frame.ratio.toFixed(0) : frame.ratio.toPrecision(2)}×` : "–"],
  ];
  // In a tree, run.workers counts this server's clusters, and frame.live all workers: show the latter alone.
  if (frame.members.some((member) => member.runs)) tiles[3][1] = String(frame.live);
  tiles.forEach(([name, value], index) => {
    const tile = $("tiles").children[index] || element("div", $("tiles"));
    if (!tile.firstChild) { element("small", tile); element("b", tile); }
    put(tile.children[0], name);
    put(tile.children[1], value);
  });
  document.title = `${frame.clock} · ${run.name || "Narrows"}`;
  put($("span"), `${long(frame.first_cell * frame.cell_seconds)} – ${long(frame.seconds)}`);
  $("waits").hidden = !frame.waits;
  put($("waits"), frame.waits);
  $("hidden").hidden = !frame.hidden;
  put($("hidden"), `and ${frame.hidden} more`);
}

// Its members.

const rows = new Map(); // by path, the elements of a member's row
const strips = new Map(); // by canvas, the strip on it
const visible = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    strips.get(target).seen = isIntersecting;
    if (isIntersecting) draw(target);
  }
});

function rowOf(path) {
  const key = path.join(".");
  if (!rows.has(key)) {
    const row = element("tr", $("members"));
    const name = element("td", row);
    const cell = { row, name: name.appendChild(new Text()), host: element("span", name) };
    const canvas = element("canvas", element("td", row, "wide"));
    strips.set(canvas, { seen: false });
    visible.observe(canvas);
    cell.canvas = canvas;
    cell.rest = Array.from({ length: 10 }, () => element("td", row));
    name.style.paddingLeft = `${(path.length - 1) * 20}px`;
    rows.set(key, cell);
  }
  return rows.get(key);
}

function gpu(launches, replays, graphs, scratch) {
  return `GPU: ${graphs} graphs kept, ${replays} replayed; ${launches} kernels launched; scratch memory ${bytes(scratch)}`;
}

function taught(up, down, missed) {
  return `teachers: up ${bytes(up)}, down ${bytes(down)}${missed ? `, ${missed} batches without soft targets` : ""}`;
}

function showMember(member, frame) {
  const cell = rowOf(member.path), { row } = cell;
  const step = member.step_seconds.reduce((a, b) => a + b, 0);
  const late = member.live && !frame.over && member.quiet_seconds > Math.max(10, 3 * step);
  row.className = [member.runs && "cluster", !member.live && "gone"].filter(Boolean).join(" ");
  row.firstChild.dataset.how = member.how;
  row.title = [member.runs, `clock ${member.clock}`, member.loss !== null && `loss ${member.loss.toPrecision(4)}`,
    member.skipped && `${member.skipped} steps skipped: gradient not finite`,
    member.way && `link: ${member.way}`,
    member.relayed && `met through a relay: ${bytes(member.relay_bytes)} of its peers`,
    member.teacher && taught(member.teacher.bytes_up, member.teacher.bytes_down, member.teacher.missed),
    member.teacher && `waited for teachers: ${brief(member.teacher.seconds)}`,
    member.gpu[0] && gpu(...member.gpu),
    member.dropped && `${member.dropped} messages dropped`].filter(Boolean).join("\n");
  put(cell.name, `${member.runs ? "cluster of rank" : "rank"} ${member.path.join(".")} `);
  put(cell.host, member.relayed ? `${member.host} (relay, ${bytes(member.relay_bytes)})` : member.host);
  const texts = [
    late && !member.runs ? `none for ${long(member.quiet_seconds)}` : brief(step),
    String(member.lag),
    String(member.staleness),
    member.held_back ? member.held_back.toPrecision(2) : "–",
    rate(member.rate[0]), rate(member.rate[1]), brief(member.round_trip_seconds),
    `${(100 * Math.max(...member.busy)).toFixed(0)} %`,
    ...member.step_bytes.map((value) => (value ? bytes(value) : "–")),
  ];
  texts.forEach((text, index) => put(cell.rest[index], text));
  cell.rest[0].classList.toggle("late", late);
  cell.rest[7].title = member.busy.map((share, index) => `${["up", "down"][index]} ${(100 * share).toFixed(1)} %`).join("\n");
  const strip = strips.get(cell.canvas);
  Object.assign(strip, { strip: member.strip, first: Math.min(frame.first_cell, frame.cells - 1), cells: frame.cells });
  if (strip.seen) draw(cell.canvas);
}

// Draw a column for each time bucket. Its height is the member's steps beside those of the fastest member; its colours are the
// shares of computing, encoding and waiting.
function draw(canvas) {
  const { strip, first, cells } = strips.get(canvas);
  const ratio = devicePixelRatio, width = canvas.clientWidth * ratio, height = canvas.clientHeight * ratio;
  if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, width, height);
  if (!strip) return;
  pen.fillStyle = colors.line;
  pen.fillRect(0, height - ratio, width, ratio);
  const wide = width / (cells - first), share = (text, index) => LEVELS.indexOf(text[index] || "0") / 35;
  for (let index = first; index < strip.steps.length; index += 1) {
    const steps = share(strip.steps, index) * height, left = (index - first) * wide;
    let below = height;
    const compute = share(strip.compute, index), encode = Math.min(share(strip.encode, index), 1 - compute);
    for (const [name, part] of [["compute", compute], ["encode", encode], ["wait", 1 - compute - encode]]) {
      pen.fillStyle = colors[name];
      pen.fillRect(left, below - part * steps, wide > 3 * ratio ? wide - ratio : wide, part * steps);
      below -= part * steps;
    }
  }
}

// Loss.

const charts = {};
const AXES = { steps: (v) => count(v), seconds: (v) => long(v), bytes: (v) => bytes(v) };

function showCurves(curve) {
  for (const [name, format] of Object.entries(AXES)) {
    const box = $(`by-${name}`), width = box.clientWidth;
    if (!charts[name]) {
      const axis = { stroke: colors.faint, grid: { stroke: colors.line, width: 1 }, ticks: { show: false } };
      charts[name] = new uPlot({
        width, height: 180,
        scales: { x: { time: false } },
        axes: [{ ...axis, size: 32, space: 70, values: (_, ticks) => ticks.map(format) }, { ...axis, size: 46 }],
        series: [{ label: name, value: (_, v) => (v === null ? "–" : format(v)) },
          { label: "loss", stroke: colors.compute, width: 2, points: { show: false }, value: (_, v) => (v === null ? "–" : v.toPrecision(4)) }],
      }, [curve[name], curve.loss], box);
    } else {
      if (charts[name].width !== width) charts[name].setSize({ width, height: 180 });
      charts[name].setData([curve[name], curve.loss]);
    }
  }
}

// Events, the newest first.

let newest = "";

function showEvents(events) {
  const key = `${events.length} ${events.length ? events[events.length - 1].join(" ") : ""}`;
  if (key === newest) return;
  newest = key;
  $("events").replaceChildren(...[...events].reverse().map(([seconds, name, text]) => {
    const item = document.createElement("li"), time = element("time", item);
    time.textContent = long(seconds);
    item.append(text);
    item.className = WARN.includes(name) || / (expired|died)\b/.test(text) ? "warn" : "";
    return item;
  }));
}

// The runs of this machine beside this one; or the list of ps-top, which has the texts of a table.

const RUNS_MS = 5000;

const linked = (run) => {
  const there = /^https?:\/\//.test(run.page), item = document.createElement(there ? "a" : "span");
  if (there) { item.href = run.page; item.rel = "noreferrer"; }
  return item;
};

function listRuns({ runs, columns }) {
  const [head, body] = [$("list").querySelector("tr"), $("list").querySelector("tbody")];
  $("list").hidden = false;
  head.replaceChildren();
  for (const name of columns) put(element("th", head), name);
  body.replaceChildren();
  for (const run of runs) {
    const row = element("tr", body);
    row.title = run.summary;
    for (const name of columns) {
      const item = name === "page" ? linked(run) : document.createElement("span");
      put(item, run.cells[name]);
      element("td", row).append(item);
    }
  }
}

function showRuns({ runs, pid }) {
  const others = runs.filter((run) => run.pid !== pid);
  $("runs").hidden = !others.length;
  $("runs").replaceChildren(...others.map((run) => {
    const item = linked(run), clock = run.clock < 0 ? "" : `clock ${whole(run.clock)}`;
    item.textContent = [run.name || run.address, run.mode, clock].filter(Boolean).join(" · ");
    item.title = [run.address, run.summary, item.href ? "" : "it has no page"].filter(Boolean).join("\n");
    return item;
  }));
}

async function lookAtRuns() {
  try {
    const answer = await fetch("runs.json");
    const found = answer.ok && (await answer.json());
    if (found) (found.columns ? listRuns : showRuns)(found);
    else if (answer.status === 404) return; // this page is for other machines too, or that of a record
  } catch { /* the server does not answer: the state says so */ }
  setTimeout(lookAtRuns, RUNS_MS);
}

let frame = null;

function show(next) {
  const began = performance.now();
  frame = next;
  document.querySelector("main").hidden = frame.run.lists === true; // a page of several runs has no run of its own
  showRun(frame);
  const known = rows.size;
  for (const member of frame.members) showMember(member, frame);
  if (rows.size > known) $("members").append(...frame.members.map((member) => rows.get(member.path.join(".")).row));
  showCurves(frame.curve);
  showEvents(frame.events);
  $("state").className = frame.over ? "" : "live";
  put($("state"), frame.over ? `over after ${long(frame.seconds)}` : `live, ${long(frame.seconds)}`);
  document.body.dataset.frameMs = (performance.now() - began).toFixed(1);
}

readColors();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColors();
  for (const name of Object.keys(charts)) { charts[name].destroy(); delete charts[name]; }
  if (frame) show(frame);
});
addEventListener("resize", () => frame && show(frame));

lookAtRuns();
const source = new EventSource("events");
source.onmessage = (event) => show(JSON.parse(event.data));
source.onerror = () => {
  if (frame && frame.over) { source.close(); return; }
  $("state").className = "lost";
  put($("state"), "the server does not answer");
};
