// The head of the page, and what mouse and keys do.

function describe() {
  const answered = data.requests.filter((request) => request.firstToken !== null);
  const onTime = answered.filter((request) => !request.isLate);
  document.querySelector("h1").textContent = `${data.title}, ${duration(data.duration)}`;
  document.getElementById("note").textContent = data.note;
  const facts = Object.entries(data.facts).map(([name, value]) => `${name} ${value}`);
  const numSteps = data.runs.filter((run) => !run.isPrefill).length;
  const numPreempted = data.runs.filter((run) => run.isPreempted).length;
  document.getElementById("facts").textContent = [
    `${data.requests.length} requests`,
    `${answered.length} with a first token, ${onTime.length} of those on time`,
    `${data.runs.length - numSteps} stretches of prefill, ${numPreempted} preemptions`,
    `${numSteps} decode steps`,
    ...facts,
  ].join(" · ");
  document.body.dataset.requests = data.requests.length;
}

function legend() {
  const box = (color) => `<rect x="2" y="2" width="22" height="10" fill="${color}"/>`;
  const mark = (name, color) =>
    `<path transform="translate(13 7) scale(.8)" d="${SHAPES[name]}" fill="${color}"/>`;
  const entries = data.classes.map((name, klass) =>
    [box(colors.shade(klass, null)), `prefill, ${name || "no class"}`]);
  const wide = 22 / Math.max(1, data.groups.length);
  const shades = data.groups.map((_, group) => {
    const place = `x="${2 + wide * group}" y="2" width="${wide}" height="10"`;
    return `<rect ${place} fill="${colors.shade(0, group)}"/>`;
  });
  if (shades.length) entries.push([shades.join(""), `zoomed in: ${data.groups.join(", ")}`]);
  entries.push(
    [box(colors.decode), "decode step"],
    [box(colors["time-band"]), "arrival to first token"],
    [box(colors["late-band"]), "the same, late"],
    [box(colors["none-band"]), "no token yet"],
    [mark("first", colors.time), "first token"],
    [mark("first", colors.late), "late first token"],
    [mark("deadline", colors.text), "deadline"],
    [mark("preempted", colors.mark), "preempted"],
    [mark("end", colors.text), "end"],
    [mark("error", colors.text), "cancelled or failed"],
  );
  const items = entries.map(([drawing, words]) => {
    const item = document.createElement("span");
    item.innerHTML = `<svg viewBox="0 0 26 14">${drawing}</svg>`;  // of this script's own making
    item.append(words);
    return item;
  });
  document.getElementById("legend").replaceChildren(...items);
}

function show(from, to) {
  const low = Math.min(first, 0), high = data.duration * 1.02;
  const span = Math.max(MIN_SPAN, Math.min(to - from, high - low));
  view.from = Math.min(Math.max(from, low), high - span);
  view.to = view.from + span;
  tip.style.display = "none";
  draw();
}

function zoom(factor, around = (view.from + view.to) / 2) {
  show(around - (around - view.from) * factor, around + (view.to - around) * factor);
}

function pan(share) {
  const by = share * (view.to - view.from);
  show(view.from + by, view.to + by);
}

function at(event) {
  const box = canvas.getBoundingClientRect();
  const left = event.clientX - box.left, top = event.clientY - box.top;
  const t = time(left);
  const place = top < TOP ? -1 : Math.floor((top - TOP + scroller.scrollTop) / LANE);
  const request = data.requests[place] ?? null;
  let runs = [];
  if (left >= GUTTER && top >= AXIS && top < TOP) runs = [data.runs];
  if (left >= GUTTER && request) runs = [request.prefills, request.steps];
  const slack = (view.to - view.from) / (width - GUTTER);  // a pixel: thin bars can be hit
  const run = runs.map((some) => some[firstEndingAfter(some, t - slack)])
    .find((one) => one && one.start <= t + slack) ?? null;
  const group = run ? run.groups.find((one) => one.start <= t && t < one.end) : null;
  return { request, run, group };
}

function hover(event) {
  const { request, run, group } = at(event);
  const owners = run ? run.places.map((place) => data.requests[place]) : [];
  const shown = request ?? (owners.length === 1 ? owners[0] : null);
  const [headline, ...rest] = tooltip(shown, run);
  tip.style.display = headline ? "block" : "none";
  if (!headline) return;
  tip.replaceChildren(...[headline, ...groupLines(group), ...rest].map((line) => {
    const row = document.createElement("div");
    row.textContent = line;
    return row;
  }));
  const { offsetWidth, offsetHeight } = tip;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - offsetWidth - 6)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - offsetHeight - 6)}px`;
}

let drag = null;
canvas.addEventListener("pointerdown", (event) => {
  const { from, to } = view;
  drag = { left: event.clientX, top: event.clientY, from, to, scroll: scroller.scrollTop };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointerup", () => { drag = null; });
canvas.addEventListener("pointermove", (event) => {
  if (!drag) return hover(event);
  const by = (drag.left - event.clientX) * (drag.to - drag.from) / (width - GUTTER);
  scroller.scrollTop = drag.scroll + drag.top - event.clientY;
  show(drag.from + by, drag.to + by);
});
canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
canvas.addEventListener("dblclick", (event) => {
  const { request } = at(event);
  if (!request) return;
  const until = request.firstToken ?? request.end ?? data.duration;
  const margin = 0.05 * (until - request.arrival) + MIN_SPAN;
  show(request.arrival - margin, until + margin);
});
scroller.addEventListener("wheel", (event) => {
  const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
  if (event.ctrlKey || event.metaKey) {
    zoom(Math.exp(event.deltaY / 300), Math.max(view.from, time(event.clientX)));
  } else if (sideways) {
    pan(sideways / 1000);
  } else {
    return;  // the browser scrolls
  }
  event.preventDefault();
}, { passive: false });
scroller.addEventListener("scroll", draw);
addEventListener("resize", setUp);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", setUp);
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const act = {
    "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7),
    ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15),
    ArrowUp: () => { scroller.scrollTop -= 3 * LANE; },
    ArrowDown: () => { scroller.scrollTop += 3 * LANE; },
    0: () => show(0, data.duration),
  }[event.key];
  if (act) {
    act();
    event.preventDefault();
  }
});

describe();
setUp();
