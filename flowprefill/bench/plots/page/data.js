// The page's data as objects, and what they are in words. Draws nothing.

// See page_data in timeline_page.py.
function read(raw) {
  const requests = raw.requests.map((values, place) => {
    const [id, name, klass, arrival, firstToken, deadline, end, outcome, ...counts] = values;
    const [tokens, cached, output] = counts;
    const known = firstToken ?? Math.min(end ?? Infinity, raw.duration);
    const isLate = deadline !== null && known > deadline;
    return {
      place, id, name, klass, arrival, firstToken, deadline, end, outcome, tokens, cached, output,
      isLate, prefills: [], steps: [],
    };
  });
  const runs = raw.runs.map(([isPrefill, places, start, end, isDone, isPreempted, flat]) => {
    const groups = [];
    for (let i = 0; i < flat.length; i += 4) {
      groups.push({ group: flat[i], start: flat[i + 1], end: flat[i + 2], slice: flat[i + 3] });
    }
    const run = { isPrefill, places, start, end, isDone, isPreempted, groups };
    for (const place of places) requests[place][isPrefill ? "prefills" : "steps"].push(run);
    return run;
  });
  return { ...raw, requests, runs };
}

function duration(us) {
  if (us >= 999500) return `${(us / 1e6).toFixed(us < 9.9995e6 ? 2 : 1)} s`;
  return us >= 999.5 ? `${(us / 1000).toFixed(us < 99500 ? 1 : 0)} ms` : `${Math.round(us)} µs`;
}

function instant(us) {
  return `${(us / 1e6).toFixed(view.to - view.from < 2e5 ? 5 : 3)} s`;
}

function className(request) {
  return data.classes[request.klass] || "no class";
}

function requestName(request) {
  return `#${request.id}${request.name ? ` ${request.name}` : ""}`;
}

function ttftText(request) {
  if (request.firstToken !== null) {
    return duration(request.firstToken - request.arrival) + (request.isLate ? " late" : "");
  }
  return request.outcome || "no token yet";
}

function tooltip(request, run) {
  const lines = [];
  if (run && run.isPrefill) {
    const names = run.places.map((place) => `#${data.requests[place].id}`);
    lines.push(`prefill of ${shortList(names)}: ${duration(run.end - run.start)}`);
    const left = run.isPreempted ? "left for another prefill" : "left at a boundary";
    lines.push(run.isDone ? "until its end" : left);
  } else if (run) {
    lines.push(`decode step of ${run.places.length}: ${duration(run.end - run.start)}`);
  }
  if (run) lines.push(`from ${instant(run.start)} to ${instant(run.end)}`);
  return lines.concat(request ? requestLines(request) : []);
}

function groupLines(group) {
  if (!group) return [];
  const length = group.end - group.start;
  const number = Math.max(1, Math.round(length / Math.max(1, group.slice)));
  const slices = number > 1 ? `${number} slices of ${duration(group.slice)}` : "1 slice";
  return [`${data.groups[group.group]}: ${duration(length)}, ${slices}`];
}

function requestLines(request) {
  const { arrival, firstToken, deadline, end } = request;
  const lines = [`request ${requestName(request)}, ${className(request)}`];
  lines.push(`prompt of ${request.tokens} tokens, ${request.cached} of them cached`);
  lines.push(`${request.output} tokens generated`);
  lines.push(`arrival at ${instant(arrival)}`);
  if (firstToken !== null) lines.push(`first token after ${duration(firstToken - arrival)}`);
  if (deadline !== null) {
    const inTime = firstToken === null ? "not yet late" : "on time";
    lines.push(`objective ${duration(deadline - arrival)}: ${request.isLate ? "late" : inTime}`);
  }
  const numPreempted = request.prefills.filter((run) => run.isPreempted).length;
  if (numPreempted) lines.push(`preempted ${numPreempted === 1 ? "once" : `${numPreempted} times`}`);
  if (end !== null) lines.push(`${request.outcome} at ${instant(end)}`);
  return lines;
}

function shortList(names) {
  const more = names.length > 4 ? ` and ${names.length - 4} more` : "";
  return names.slice(0, 4).join(" ") + more;
}
