// The filters above the table of findings/index.md, made from its cells: without scripts the table is all there is.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const table = [...document.querySelectorAll("table")].find((one) => one.rows[0].cells[0].textContent === "finding");
  if (!table) return;
  const rows = [...table.tBodies[0].rows];
  const filters = [
    search(),
    filter("Parallelism", parallelismsOf(rows), (row, wanted) => hasParallelism(textOf(row, 1), wanted)),
    filter("torch", versionsOf(rows), (row, wanted) => hasVersion(textOf(row, 2), wanted)),
    filter("Severity", unique(rows.map((row) => textOf(row, 3))), (row, wanted) => textOf(row, 3) === wanted),
  ];
  const count = Object.assign(document.createElement("output"), { ariaLive: "polite" });
  const show = () => {
    for (const row of rows) row.hidden = !filters.every((one) => one.accepts(row));
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} findings`;
  };
  const bar = Object.assign(document.createElement("form"), { className: "findings-filters", oninput: show });
  bar.append(...filters.map((one) => one.label), count);
  table.dataset.findings = "";
  (table.closest(".md-typeset__scrollwrap") ?? table).before(bar);
  show();
});

function textOf(row, column) {
  return row.cells[column].textContent;
}

function unique(values) {
  return [...new Set(values)];
}

function parallelismsOf(rows) {
  return unique(rows.flatMap((row) => textOf(row, 1).split(", "))).sort();
}

function hasParallelism(cell, wanted) {
  const named = cell.split(", ");
  return named.includes(wanted) || named.includes("any");
}

// A cell has versions, or a range of them: "2.11, 2.13", "2.11–2.15".
function versionsOf(rows) {
  return unique(rows.flatMap((row) => textOf(row, 2).split(/, |–/))).sort();
}

function hasVersion(cell, wanted) {
  return cell.split(", ").some((part) => {
    const [first, last = first] = part.split("–").map(Number);
    return first <= Number(wanted) && Number(wanted) <= last;
  });
}

function search() {
  const label = Object.assign(document.createElement("input"), { type: "search", placeholder: "Search titles" });
  return { label, accepts: (row) => textOf(row, 0).toLowerCase().includes(label.value.toLowerCase()) };
}

function filter(name, values, fits) {
  const select = document.createElement("select");
  select.append(new Option("all", ""), ...values.map((value) => new Option(value, value)));
  const label = document.createElement("label");
  label.append(name, select);
  return { label, accepts: (row) => select.value === "" || fits(row, select.value) };
}
