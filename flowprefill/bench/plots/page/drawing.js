// One canvas: time axis and device on top, below them a lane per request.
// Times are microseconds from the recording's start; x and y are CSS pixels of the canvas.

const GUTTER = 390, AXIS = 26, DEVICE = 34, LANE = 22, TOP = AXIS + DEVICE + 8;
const COLUMNS = { request: 12, class: 128, tokens: 282, ttft: GUTTER - 18 };
const HUES = [212, 285, 45, 178, 338, 15];  // of SLO classes; green is for "on time"
const MIN_SPAN = 50;
const FONT = "12px system-ui, sans-serif";

const data = read(JSON.parse(document.getElementById("data").textContent));
const scroller = document.getElementById("scroller");
const canvas = scroller.querySelector("canvas");
const pen = canvas.getContext("2d");
const tip = document.getElementById("tip");
const first = Math.min(0, ...data.requests.map((request) => request.arrival));
const view = { from: 0, to: data.duration };
let colors, width, height, numBars;

function setUp() {
  const style = getComputedStyle(document.documentElement);
  colors = {};
  for (const name of ["back", "text", "faint", "line", "grid", "late", "late-band", "time",
    "time-band", "none-band", "decode", "mark"]) {
    colors[name] = style.getPropertyValue(`--${name}`).trim();
  }
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  colors.shade = (klass, group) => {
    const light = (isDark ? 58 : 44) + (group === null ? 0 : [0, 16, -12, 8, -6][group % 5]);
    return `hsl(${HUES[klass % HUES.length]} 58% ${light}%)`;
  };
  width = scroller.clientWidth;
  height = scroller.clientHeight;
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const total = TOP + LANE * data.requests.length + 12;
  document.getElementById("spacer").style.height = `${Math.max(0, total - height)}px`;
  legend();
  draw();
}

function x(us) {
  return GUTTER + (us - view.from) * (width - GUTTER) / (view.to - view.from);
}

function time(px) {
  return view.from + (px - GUTTER) * (view.to - view.from) / (width - GUTTER);
}

function draw() {
  pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  pen.font = FONT;
  pen.textBaseline = "middle";
  pen.fillStyle = colors.back;
  pen.fillRect(0, 0, width, height);
  numBars = 0;
  const top = scroller.scrollTop;
  const from = Math.max(0, Math.floor(top / LANE));
  const to = Math.min(data.requests.length, Math.ceil((top + height - TOP) / LANE));
  clipped(0, TOP, width, height - TOP, () => {
    drawGrid();
    for (let place = from; place < to; place++) {
      drawLane(data.requests[place], TOP + place * LANE - top);
    }
  });
  drawHead();
  document.body.dataset.bars = numBars;
  document.body.dataset.lanes = Math.max(0, to - from);
}

function clipped(left, top, wide, high, paint) {
  pen.save();
  pen.beginPath();
  pen.rect(left, top, wide, high);
  pen.clip();
  paint();
  pen.restore();
}

function ticks() {
  const least = (view.to - view.from) * 110 / (width - GUTTER);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least);
  const found = [];
  for (let i = Math.ceil(view.from / step); i * step <= view.to; i++) found.push(i * step);
  return { step, found };
}

function drawGrid() {
  pen.fillStyle = colors.grid;
  for (const t of ticks().found) pen.fillRect(Math.round(x(t)), 0, 1, height);
}

function drawHead() {
  const { step, found } = ticks();
  text("request", COLUMNS.request, AXIS / 2, colors.faint);
  text("class", COLUMNS.class, AXIS / 2, colors.faint);
  text("tokens", COLUMNS.tokens, AXIS / 2, colors.faint, "right");
  text("TTFT", COLUMNS.ttft, AXIS / 2, colors.faint, "right");
  const digits = Math.max(0, 6 - Math.floor(Math.log10(step) + 1e-9));
  clipped(GUTTER, 0, width - GUTTER, TOP, () => {
    for (const t of found) {
      pen.fillStyle = colors.line;
      pen.fillRect(Math.round(x(t)), AXIS - 5, 1, 5);
      text(`${(t / 1e6).toFixed(digits)} s`, x(t) + 4, AXIS / 2, colors.faint);
    }
    drawRuns(data.runs, AXIS + 3, DEVICE - 6);
  });
  text("device", COLUMNS.request, AXIS + DEVICE / 2, colors.text);
  text(shares(), COLUMNS.class, AXIS + DEVICE / 2, colors.faint);
  pen.fillStyle = colors.line;
  pen.fillRect(0, TOP - 3, width, 1);
  pen.fillRect(GUTTER - 8, 0, 1, height);
}

function shares() {
  const busy = [0, 0];  // decode, prefill, in what is seen
  for (const run of data.runs) {
    busy[run.isPrefill] += Math.max(0, Math.min(run.end, view.to) - Math.max(run.start, view.from));
  }
  const [decode, prefill] = busy.map((us) => Math.round(100 * us / (view.to - view.from)));
  return `prefill ${prefill} %, decode ${decode} % of this view`;
}

function drawLane(request, y) {
  const middle = y + LANE / 2;
  const onTime = request.firstToken === null ? colors.faint : colors.time;
  const ink = request.isLate ? colors.late : onTime;
  const { request: left, class: second, tokens, ttft } = COLUMNS;
  text(requestName(request), left, middle, colors.text, "left", second - left - 8);
  pen.fillStyle = colors.shade(request.klass, null);
  pen.fillRect(second, middle - 5, 10, 10);
  text(className(request), second + 16, middle, colors.text, "left", tokens - second - 66);
  text(String(request.tokens), tokens, middle, colors.text, "right");
  text(ttftText(request), ttft, middle, ink, "right", ttft - tokens - 10);
  clipped(GUTTER, y, width - GUTTER, LANE, () => {
    drawBand(request, y);
    drawRuns(request.steps, y + 7, LANE - 14, request);
    drawRuns(request.prefills, y + 4, LANE - 8, request);
    drawMarks(request, y, ink);
  });
}

function drawBand(request, y) {
  const until = request.firstToken ?? Math.min(request.end ?? Infinity, data.duration);
  const onTime = request.firstToken === null ? "none-band" : "time-band";
  pen.fillStyle = colors[request.isLate ? "late-band" : onTime];
  const left = Math.max(x(request.arrival), GUTTER - 2);
  const right = Math.min(x(until), width + 2);
  if (right > left) pen.fillRect(left, y + 2, Math.max(1, right - left), LANE - 4);
}

// Runs in the order of time. What is narrower than a pixel is drawn together with its neighbours.
function drawRuns(runs, y, high, request = null) {
  let open = null;
  const flush = () => {
    if (!open) return;
    fillBar(open.left, open.right, y, high, open.color);
    open = null;
  };
  const scale = (width - GUTTER) / (view.to - view.from);
  for (let i = firstEndingAfter(runs, view.from); i < runs.length && runs[i].start < view.to; i++) {
    const run = runs[i];
    const left = Math.max(x(run.start), GUTTER - 1);
    const right = Math.min(x(run.end), width + 1);
    const isWide = right - left > 3;
    const owner = request ?? data.requests[run.places[0]];
    const color = run.isPrefill ? colors.shade(owner ? owner.klass : 0, null) : colors.decode;
    const groupWidth = (run.end - run.start) * scale / Math.max(1, run.groups.length);
    if (open && (isWide || color !== open.color || left > open.right + 0.4)) flush();
    if (run.groups.length && groupWidth >= 3) {
      drawGroups(run, owner ? owner.klass : 0, y, high, scale);
    } else if (isWide) {
      fillBar(left, right - 0.7, y, high, color);  // so that neighbours are told apart
      if (!request) runLabel(run, left, right, y + high / 2);
    } else if (open) {
      open.right = Math.max(open.right, right);
    } else {
      open = { left, right, color };
    }
  }
  flush();
}

function fillBar(left, right, y, high, color) {
  pen.fillStyle = color;
  pen.fillRect(left, y, Math.max(1, right - left), high);
  numBars++;
}

function runLabel(run, left, right, middle) {
  const names = run.places.map((place) => `#${data.requests[place].id}`);
  const label = run.isPrefill ? shortList(names) : `×${run.places.length}`;
  if (right - left > 24 && pen.measureText(label).width < right - left - 8) {
    text(label, left + 4, middle, colors.back);
  }
}

function drawGroups(run, klass, y, high, scale) {
  const { groups } = run;
  for (let i = firstEndingAfter(groups, view.from); i < groups.length; i++) {
    const { group, start, end, slice } = groups[i];
    if (start >= view.to) break;
    const left = x(start), right = x(end);
    fillBar(left, right, y, high, colors.shade(klass, group));
    drawSliceEdges(left, Math.min(right - 1, width), slice * scale, y, high);
    const name = data.groups[group];
    const from = Math.max(left, GUTTER) + 4;
    const wide = pen.measureText(name).width;
    if (wide < Math.min(right, width) - from - 4) {
      pen.fillStyle = colors.shade(klass, group);
      pen.fillRect(from - 2, y, wide + 4, high);  // over edges of slices
      text(name, from, y + high / 2, colors.back);
    }
  }
}

function drawSliceEdges(left, right, step, y, high) {
  if (step < 4) return;
  pen.fillStyle = colors.back;
  const unseen = Math.max(0, Math.floor((GUTTER - left) / step));
  for (let edge = left + (unseen + 1) * step; edge < right; edge += step) {
    pen.fillRect(edge, y, 0.7, high);
  }
}

function firstEndingAfter(sorted, us) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle].end > us) high = middle; else low = middle + 1;
  }
  return low;
}

function drawMarks(request, y, ink) {
  const middle = y + LANE / 2;
  pen.fillStyle = colors.mark;
  for (const run of request.prefills) {
    if (run.isPreempted) shape("preempted", x(run.end), middle);
  }
  pen.fillStyle = colors.text;
  if (request.deadline !== null) shape("deadline", x(request.deadline), middle);
  const end = request.outcome === "finished" ? "end" : "error";
  if (request.end !== null) shape(end, x(request.end), middle);
  pen.fillStyle = ink;
  if (request.firstToken !== null) shape("first", x(request.firstToken), middle);
}

const SHAPES = {  // around 0, 0
  first: "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
  deadline: "M-1 -9h2v18h-2zM1 -9l6 3l-6 3z",
  preempted: "M0 -8v16h-1.5v-5l-5 -3l5 -3v-5z",
  end: "M-1 -5h2v10h-2z",
  error: "M-4 -5.5l4 4l4 -4l1.5 1.5l-4 4l4 4l-1.5 1.5l-4 -4l-4 4l-1.5 -1.5l4 -4l-4 -4z",
};

function shape(name, left, top) {
  if (left < GUTTER - 10 || left > width + 10) return;
  pen.translate(left, top);
  pen.fill(new Path2D(SHAPES[name]));
  if (name === "first") {
    pen.strokeStyle = colors.back;
    pen.stroke(new Path2D(SHAPES.first));
  }
  pen.translate(-left, -top);
}

function text(words, left, middle, color, align = "left", room = Infinity) {
  pen.fillStyle = color;
  pen.textAlign = align;
  if (room < Infinity && pen.measureText(words).width > room) {
    let low = 0, high = words.length;  // how many characters fit beside the dots
    while (low < high) {
      const number = (low + high + 1) >> 1;
      if (pen.measureText(`${words.slice(0, number)}…`).width <= room) low = number;
      else high = number - 1;
    }
    words = words.slice(0, low) + "…";
  }
  pen.fillText(words, left, middle);
}
