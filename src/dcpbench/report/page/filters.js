// The controls above the matrix. They are built once and then updated, so that they keep the focus.

function makeFilters(app) {
  const statuses = [...KINDS.values()].filter((kind) => app.runs.some((run) => run.kind.name === kind.name)).reverse();
  fill(byId("statuses"), ...statuses.map((kind) => statusChip(app, kind)));
  fill(byId("axis-filters"), ...app.varying.map((axis) => axisMenu(app, axis)));
  byId("search").addEventListener("input", (event) => app.change((state) => { state.text = event.target.value; }));
  for (const id of ["reset", "reset-all"]) byId(id).addEventListener("click", () => resetFilters(app));
  document.addEventListener("click", closeOtherMenus);
  document.addEventListener("keydown", closeMenuOnEscape);
}

function resetFilters(app) {
  app.change((state) => Object.assign(state, { text: "", statuses: new Set(), values: new Map() }));
  byId("search").focus();
}

function statusChip(app, kind) {
  const count = app.runs.filter((run) => run.kind.name === kind.name).length;
  const press = () => app.change((state) => toggle(state.statuses, kind.name));
  return button([badge(kind), ` ${kind.label} `, el("b", {}, String(count))], press, {
    class: "chip", "data-status": kind.name, "aria-pressed": "false", title: `${kind.label}: ${kind.means}`,
  });
}

function badge(kind) {
  return el("span", { class: `badge s-${kind.name}`, "aria-hidden": "true" }, kind.letter);
}

function axisMenu(app, axis) {
  const boxes = app.axes.get(axis).map((value) => el("label", {}, el("input", {
    type: "checkbox", value, "data-axis": axis,
    change: () => app.change((state) => toggle(chosen(state, axis), value)),
  }), ` ${plain(value)}`));
  return el("details", { class: "menu", "data-axis": axis },
    el("summary", {}, axis.replace(/^-+/, ""), " ", el("span", { class: "picked" })),
    el("div", { class: "popup" }, ...boxes));
}

function updateFilters(app, shown) {
  const { state, runs } = app;
  if (byId("search").value !== state.text) byId("search").value = state.text;
  for (const chip of byId("statuses").children) {
    chip.setAttribute("aria-pressed", String(state.statuses.has(chip.dataset.status)));
  }
  for (const menu of byId("axis-filters").children) updateMenu(menu, state.values.get(menu.dataset.axis) ?? new Set());
  const all = counted(runs.length, areStops(runs) ? "stop" : "run");
  byId("shown").textContent = shown.length === runs.length ? all : `${shown.length} of ${all}`;
  byId("reset").hidden = !isFiltered(state);
  byId("nothing").hidden = shown.length > 0 || runs.length === 0;
}

function updateMenu(menu, values) {
  for (const box of menu.querySelectorAll("input")) box.checked = values.has(box.value);
  const names = [...values].map(plain);
  menu.querySelector(".picked").textContent = names.length > 2 ? `${names.length} chosen` : names.join(", ");
  menu.classList.toggle("active", values.size > 0);
}

function closeOtherMenus(event) {
  for (const menu of document.querySelectorAll("details.menu[open]")) {
    if (!menu.contains(event.target)) menu.open = false;
  }
}

function closeMenuOnEscape(event) {
  const menu = event.key === "Escape" && document.activeElement?.closest("details.menu[open]");
  if (!menu) return;
  menu.open = false;
  menu.querySelector("summary").focus();
}
