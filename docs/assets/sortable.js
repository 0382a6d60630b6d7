/* Tables inside `<div class="sortable" markdown>` are sorted by a click on the head of a column.
   Without JavaScript they are ordinary tables. */
(function () {
  "use strict";

  /* The number that a text begins with, such as 0.84 of "0.84 [0.72, 0.97]"; NaN if it begins with none. */
  function leadingNumber(text) {
    const found = /^[+-]?(\d[\d,]*\.?\d*|\.\d+)(e[+-]?\d+)?/i.exec(text.trim().replace(/^[−–]/, "-"));
    return found ? parseFloat(found[0].replace(/,/g, "")) : NaN;
  }

  /* The order of texts: indices, ascending or descending, by number if all that are not empty begin with one.
     Empty texts are last in both directions, and equal ones keep their order. */
  function order(texts, descending) {
    const filled = texts.filter((text) => text.trim() !== "");
    const numeric = filled.length > 0 && filled.every((text) => !Number.isNaN(leadingNumber(text)));
    const compare = numeric
      ? (a, b) => leadingNumber(a) - leadingNumber(b)
      : (a, b) => a.trim().localeCompare(b.trim(), "en", { numeric: true, sensitivity: "base" });
    return texts
      .map((text, index) => index)
      .sort((i, j) => {
        const empty = (texts[i].trim() === "") - (texts[j].trim() === "");
        return empty || (descending ? -1 : 1) * compare(texts[i], texts[j]) || i - j;
      });
  }

  function sortBy(table, column) {
    const heads = Array.from(table.tHead.rows[0].cells);
    const body = table.tBodies[0];
    const rows = Array.from(body.rows);
    const descending = heads[column].getAttribute("aria-sort") === "ascending";
    const texts = rows.map((row) => (row.cells[column] ? row.cells[column].textContent : ""));
    order(texts, descending).forEach((index) => body.appendChild(rows[index]));
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", descending ? "descending" : "ascending");
  }

  /* A button in each head, so that a keyboard and a screen reader find it. */
  function enhance(table) {
    if (!table.tHead || !table.tBodies.length) return;
    Array.from(table.tHead.rows[0].cells).forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      button.addEventListener("click", () => sortBy(table, column));
      head.append(button);
    });
  }

  if (typeof document !== "undefined") {
    document.addEventListener("DOMContentLoaded", () => {
      document.querySelectorAll(".sortable table").forEach(enhance);
    });
  }
  if (typeof module !== "undefined") module.exports = { leadingNumber, order };
})();
