/* The table of the board: the rows of a CSV file, filtered and sorted. The file is the one that the link inside
   `<div class="board-rows" markdown>` leads to. Without JavaScript, the page has the link. */
(function () {
  "use strict";

  const ANSWERS = ["inside", "after", "second", "all", "beyond"];
  const NUMBERS = [...ANSWERS, "held", "moved", "step"];
  const FILTERS = { tokens: "1024", budget: "0.1", kind: "" };

  /* The rows of a CSV file, as objects by the names of its columns. A quoted cell may have commas and quotes. */
  function parse(text) {
    const cells = (line) =>
      Array.from(line.matchAll(/(?:^|,)(?:"((?:[^"]|"")*)"|([^,]*))/g), (found) =>
        found[1] === undefined ? found[2] : found[1].replace(/""/g, '"'));
    const [names, ...rows] = text.split("\n").filter((line) => line !== "").map(cells);
    return rows.map((row) => Object.fromEntries(names.map((name, column) => [name, row[column] || ""])));
  }

  /* Rows with every chosen value and every word of the text. */
  function filtered(rows, chosen) {
    const words = chosen.text.toLowerCase().split(/\s+/).filter((word) => word !== "");
    return rows.filter((row) =>
      Object.keys(FILTERS).every((name) => chosen[name] === "" || row[name] === chosen[name]) &&
      words.every((word) => row.policy.toLowerCase().includes(word)));
  }

  /* Rows in the order of a column; empty cells are last, and equal ones keep their order. */
  function sorted(rows, name, descending) {
    const compare = name === "policy" || name === "kind"
      ? (a, b) => a.localeCompare(b, "en", { numeric: true, sensitivity: "base" })
      : (a, b) => a - b;
    return rows.slice().sort((a, b) =>
      (a[name] === "") - (b[name] === "") || (descending ? -1 : 1) * compare(a[name], b[name]));
  }

  /* The text of a cell: a budget in percent, answers with their interval. */
  function shown(row, name) {
    const value = row[name];
    if (value === "" || name === "policy" || name === "kind") return value;
    if (name === "tokens") return Number(value).toLocaleString("en");
    if (name === "budget") return `${Math.round(100 * value)}%`;
    const end = (key) => Number(row[key]).toFixed(2).replace(/^0/, "");
    const interval = ANSWERS.includes(name) ? ` (${end(`${name}_low`)}-${end(`${name}_high`)})` : "";
    // A mark for fewer right answers than `random` has with the same bytes.
    const mark = (row.below || "").split(" ").includes(name) ? "†" : "";
    return Number(value).toFixed(2) + interval + mark;
  }

  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
    element.append(...children);
    return element;
  }

  /* A list of the values of a column, in the order of the file, and one for all of them. */
  function choice(rows, name, draw) {
    const values = Array.from(new Set(rows.map((row) => row[name])));
    const options = values.map((value) => make("option", { value }, shown({ [name]: value }, name)));
    const select = make("select", { name }, make("option", { value: "" }, "all"), ...options);
    select.value = values.includes(FILTERS[name]) ? FILTERS[name] : "";
    select.addEventListener("change", draw);
    return select;
  }

  function build(place, rows) {
    let order = ["all", true];
    const body = make("tbody", {});
    const heads = make("tr", {});
    const count = make("p", { "aria-live": "polite" });
    const text = make("input", { type: "search", name: "text", placeholder: "snapkv 4" });
    text.value = "";
    const controls = {};

    /* The head of a column is a button, which sorts by it: numbers from the largest, texts from A. */
    function head(name) {
      const button = make("button", { type: "button" }, name);
      button.addEventListener("click", () => {
        order = [name, order[0] === name ? !order[1] : NUMBERS.includes(name)];
        draw();
      });
      const sort = order[0] === name ? { "aria-sort": order[1] ? "descending" : "ascending" } : {};
      return make("th", sort, button);
    }

    function cell(row, name) {
      if (name !== "policy") return make("td", {}, shown(row, name));
      const code = make("code", {}, row.policy);
      if (window.allowBreaks) window.allowBreaks(code); // of wrap.js
      return make("td", {}, code);
    }

    function draw() {
      const chosen = { text: text.value };
      Object.entries(controls).forEach(([name, select]) => { chosen[name] = select.value; });
      const names = ["policy", ...Object.keys(FILTERS).filter((name) => chosen[name] === ""), ...NUMBERS];
      const found = sorted(filtered(rows, chosen), ...order);
      heads.replaceChildren(...names.map(head));
      body.replaceChildren(...found.map((row) => make("tr", {}, ...names.map((name) => cell(row, name)))));
      count.textContent = `${found.length} of ${rows.length} rows`;
    }

    Object.keys(FILTERS).forEach((name) => { controls[name] = choice(rows, name, draw); });
    text.addEventListener("input", draw);
    const labels = Object.entries({ ...controls, policy: text }).map(([name, control]) => make("label", {}, name, control));
    const table = make("table", {}, make("thead", {}, heads), body);
    const wrap = make("div", { class: "md-typeset__scrollwrap" }, make("div", { class: "md-typeset__table" }, table));
    place.append(make("div", { class: "board-filters" }, ...labels), count, make("div", { class: "sortable numbers" }, wrap));
    draw();
  }

  /* Fill a place from its link; if the file cannot be read, the link stays alone. */
  function fill(place) {
    const link = place.querySelector("a");
    return fetch(link.href)
      .then((answer) => (answer.ok ? answer.text() : Promise.reject(new Error(String(answer.status)))))
      .then((text) => build(place, parse(text)))
      .catch((error) => console.warn(`The table of ${link.href} is missing:`, error));
  }

  if (typeof document !== "undefined") {
    document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(".board-rows").forEach(fill));
  }
  if (typeof module !== "undefined") module.exports = { parse, filtered, sorted, shown, fill };
})();
