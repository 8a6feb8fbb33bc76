// The costs of checkpoints: each run a dot, their median a bar, one line for each configuration.

const LINES_SHOWN = 40;
const TICKS = 4;
const DECADES = 100;
// Rates are computed from metrics; `limit` is the rate of plain files.
const RATES = [
  { name: "write_rate", label: "write rate", means: "checkpoint_bytes / save_s",
    of: (run) => rate(run, run.save_s), limit: (run) => rate(run, run.raw_write_s), text: bytesPerSecond },
  { name: "read_rate", label: "read rate", means: "checkpoint_bytes / load_s",
    of: (run) => rate(run, run.load_s), limit: (run) => rate(run, run.raw_read_s), text: bytesPerSecond },
];
const TEXTS = { s: seconds, bytes };
// Their axes have powers of two.
const BINARY = [bytes, bytesPerSecond];

// The headline metrics, then rates; `of` reads the value of a run, `text` writes it in the unit that fits.
function costsOf(app) {
  const headlines = app.metrics.filter((metric) => metric.headline).map((metric) => ({
    name: metric.name, label: metric.name, means: metric.help, of: (run) => run[metric.name], text: textOf(metric),
  }));
  return [...headlines, ...RATES];
}

function textOf(metric) {
  return TEXTS[metric.unit] ?? number;
}

function rate(run, time) {
  return run.checkpoint_bytes === null || !time ? null : run.checkpoint_bytes / time;
}

function isMeasured(value) {
  return value !== null && value !== undefined;
}

function drawCosts(app, all) {
  const shown = all.filter((run) => run.retry_of === null);
  const costs = costsOf(app).map((cost) => ({ ...cost, all: measuredIn(shown, cost.of) })).filter((cost) => cost.all.length);
  const section = byId("costs");
  section.hidden = costs.length === 0;
  if (section.hidden) return;
  const cells = [...groupBy(shown, (run) => run.place).values()];
  const timed = (runs) => runs.filter((run) => costs.some((cost) => isMeasured(cost.of(run)))).length;
  const lines = cells.filter(timed);
  const scales = new Map(costs.map((cost) => {
    const together = costs.filter((other) => other.text === cost.text);
    const limits = together.flatMap((other) => (other.limit ? measuredIn(shown, other.limit) : []));
    return [cost.name, scaleFor([...together.flatMap((other) => other.all), ...limits], app.state.log, BINARY.includes(cost.text) ? 2 : 10)];
  }));
  const { sort } = app.state;
  const sorted = sortLines(lines, costs.find((cost) => sort.replace("-", "") === cost.name), sort.startsWith("-"));
  const line = (runs) => costLine(app, runs, timed(runs), costs, scales);
  fill(section,
    el("div", { class: "heading" }, el("h2", { id: "costs-title" }, "Costs"), logChoice(app, scales)),
    el("p", { class: "note" },
      "Dot: a run (hollow: not ok). Bar: median. Times are of the slowest rank, for one checkpoint. All times share an axis, and so do both rates.",
      costs.some((cost) => cost.limit && measuredIn(shown, cost.limit).length)
        && " Dashed line: plain files of the same size.",
      lines.some((runs) => timed(runs) < runs.length)
        && " n of m: the other runs have no times, because they shared their devices or ended early."),
    scroller(null, el("table", { class: "plain costs" },
      el("thead", {}, el("tr", {},
        el("th", { scope: "col" }, "cell"),
        el("th", { scope: "col", class: "n" }, "runs"),
        ...costs.map((cost) => costHeader(app, cost, scales.get(cost.name))))),
      el("tbody", {}, ...firstOf(sorted, LINES_SHOWN, line, (rest) => `Show ${rest} more`).map(asRow)))));
}

function measuredIn(runs, of) {
  return runs.map(of).filter(isMeasured);
}

// From 0, or in powers of `base`: by the reader's choice, else if the largest value is 100 times the smallest.
function scaleFor(all, choice, base) {
  const positive = all.filter((value) => value > 0);
  const high = positive.reduce((a, b) => Math.max(a, b), 0) || 1;
  const low = positive.reduce((a, b) => Math.min(a, b), high);
  const log = choice ?? high / low >= DECADES;
  const ticks = log ? powersOf(base, low, high) : roundNumbers(base, high);
  const [first, last] = [ticks[0], ticks.at(-1)];
  const at = log ? (value) => Math.log(Math.max(value, first) / first) / Math.log(last / first) : (value) => value / last;
  return { log, ticks, percent: (value) => `${(3 + 94 * at(value)).toFixed(2)}%` };
}

function powersOf(base, low, high) {
  const log = base === 2 ? Math.log2 : Math.log10;
  const first = Math.floor(log(low));
  const last = Math.max(Math.ceil(log(high)), first + 1);
  const every = Math.ceil((last - first) / TICKS);
  return Array.from({ length: Math.ceil((last - first) / every) + 1 }, (_, i) => base ** (first + i * every));
}

function roundNumbers(base, high) {
  const [power] = powersOf(base, high / TICKS, high);
  const step = power * [1, 2, 5, 10].find((times) => times * power * TICKS >= high);
  return Array.from({ length: Math.ceil(high / step) + 1 }, (_, i) => i * step);
}

function sortLines(lines, cost, descending) {
  if (!cost) return lines;
  const middle = (runs) => {
    const values = measuredIn(runs, cost.of);
    return values.length ? median(values) : null;
  };
  const keyed = lines.map((runs) => [middle(runs), runs]);
  keyed.sort(([a], [b]) => (a === null) - (b === null) || (descending ? b - a : a - b));
  return keyed.map(([, runs]) => runs);
}

// Up, down, and back to the order of the sweep.
function costHeader(app, cost, scale) {
  const { sort } = app.state;
  const now = sort === cost.name ? "ascending" : sort === `-${cost.name}` ? "descending" : "none";
  const next = { none: `-${cost.name}`, descending: cost.name, ascending: "" }[now];
  const press = () => {
    app.change((state) => { state.sort = next; });
    byId("costs").querySelector(`[data-sort="${cost.name}"]`)?.focus();
  };
  const mark = { none: "", ascending: " \u2191", descending: " \u2193" }[now];
  const short = (value) => (value ? cost.text(value).replace(".0 ", " ").replace(".00 ", " ") : "0");
  const last = scale.ticks.length - 1;
  const anchors = { 0: "start", [scale.log ? last / 2 : 0]: scale.log ? "middle" : "start", [last]: "end" };
  return el("th", { scope: "col", "aria-sort": now },
    button(cost.label + mark, press, { class: "link", "data-sort": cost.name, title: `${cost.means}; sort` }),
    el("div", { class: "cost" }, svg("svg", { class: "strip axis" }, ...scale.ticks.map((tick, i) => anchors[i] && svg("text", {
      x: scale.percent(tick), y: "12", "text-anchor": anchors[i],
    }, short(tick))))));
}

function logChoice(app, scales) {
  const box = el("input", { type: "checkbox", id: "log", change: () => {
    app.change((state) => { state.log = box.checked; });
    byId("log").focus();
  } });
  box.checked = [...scales.values()].some((scale) => scale.log);
  return el("label", { class: "choice" }, box, " log scale");
}

function costLine(app, runs, timed, costs, scales) {
  return el("tr", {},
    el("th", { scope: "row" }, button(visible(runs[0].name), () => app.open(runs[0]), { class: "link", title: plain(runs[0].cell) })),
    el("td", { class: "n" }, timed < runs.length ? `${timed} of ${runs.length}` : String(timed)),
    ...costs.map((cost) => costCell(runs, cost, scales.get(cost.name))));
}

function costCell(runs, cost, scale) {
  const measured = runs.filter((run) => isMeasured(cost.of(run)));
  if (!measured.length) return el("td", {}, DASH);
  const values = measured.map(cost.of);
  const middle = median(values);
  const limits = cost.limit ? measuredIn(measured, cost.limit) : [];
  const limit = limits.length ? median(limits) : null;
  const share = limit && `${number(100 * middle / limit, 2)} % of raw`;
  const range = `${cost.text(Math.min(...values))} to ${cost.text(Math.max(...values))}`;
  const title = values.length > 1 ? `${cost.label}: median ${cost.text(middle)}, ${range} in ${values.length} runs` : `${cost.label}: ${cost.text(middle)}, one run`;
  return el("td", { title }, el("div", { class: "cost" },
    strip(measured, cost, scale, middle, limit),
    el("span", { class: "n" }, cost.text(middle), share && el("small", {}, share))));
}

function strip(runs, cost, scale, middle, limit) {
  const at = (value) => scale.percent(value);
  const values = runs.map(cost.of);
  return svg("svg", { class: "strip", "aria-hidden": "true" },
    ...scale.ticks.map((tick) => svg("line", { class: "ground", x1: at(tick), x2: at(tick), y1: "0", y2: "16" })),
    svg("line", { class: "range", x1: at(Math.min(...values)), x2: at(Math.max(...values)), y1: "50%", y2: "50%" }),
    runs.length > 1 ? svg("line", { class: "median", x1: at(middle), x2: at(middle), y1: "2", y2: "14" }) : null,
    limit && svg("line", { class: "limit", x1: at(limit), x2: at(limit), y1: "0", y2: "16" }),
    ...runs.map((run) => svg("circle", {
      class: run.ok ? "dot" : "dot hollow", cx: at(cost.of(run)), cy: "50%", r: "3",
    }, svg("title", {}, `${cost.label} ${cost.text(cost.of(run))}, ${run.kind.label}${runs.length > 1 ? `, repeat ${plain(run.repeat)}` : ""}`))));
}

function asRow(line) {
  return line.matches("tr") ? line : el("tr", { "data-more": true }, el("td", { colspan: "9" }, line));
}
