// Tables that sort at a click or a key press on their headers, and boxes that scroll within the page for those without a mouse.
// Pages can be read without any of it.
"use strict";

(() => {
  const SORTABLE_FROM = 4; // rows; fewer are seen at a glance
  const words = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

  // "1.731 [1.704, 1.758]" -> 1.731, "+109,716 %" -> 109716, "< 0.001" -> 0.001, "27 of 0–29" -> 27; words and sets: null.
  function number(text) {
    const found = text.trim().replace(/^[<>≈~]\s*/, "").replace(/\u2212/g, "-").match(/^[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?/i);
    return found ? Number(found[0].replace(/,/g, "")) : null;
  }

  // The text that was written, not the glyphs and the hidden copy that MathJax puts in its place.
  function written(cell) {
    if (!cell) return "";
    const copy = cell.cloneNode(true);
    copy.querySelectorAll("mjx-assistive-mml").forEach((part) => part.remove());
    return copy.textContent.trim();
  }

  // {2, 15, 27} -> [2, 15, 27]
  function set(text) {
    return /^\{[\d,\s]+\}$/.test(text) ? text.match(/\d+/g).map(Number) : null;
  }

  function compare(a, b) {
    const [one, other] = [set(a), set(b)];
    if (!one || !other) return words.compare(a, b);
    const at = one.findIndex((value, index) => value !== other[index]);
    return at < 0 ? one.length - other.length : one[at] - (other[at] ?? -1);
  }

  function order(rows, column, direction) {
    const cells = rows.map((row) => written(row.cells[column]));
    const numbers = cells.map(number);
    const numeric = numbers.filter((value) => value !== null).length * 2 > cells.filter(Boolean).length;
    const missing = (at) => (numeric ? numbers[at] === null : cells[at] === "");
    return rows
      .map((row, at) => at)
      .sort((a, b) => {
        if (missing(a) || missing(b)) return missing(a) - missing(b); // no value: last in both directions
        return direction * (numeric ? numbers[a] - numbers[b] : compare(cells[a], cells[b]));
      })
      .map((at) => rows[at]);
  }

  function sortable(table) {
    const body = table.tBodies[0];
    const heads = table.tHead && table.tHead.rows.length === 1 ? [...table.tHead.rows[0].cells] : [];
    if (!body || body.rows.length < SORTABLE_FROM || table.querySelector("tbody [rowspan], tbody [colspan]")) return;
    const original = [...body.rows];
    heads.forEach((head, column) => {
      if (head.tagName !== "TH") return;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...(head.querySelector(":scope > p") || head).childNodes);
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const was = head.getAttribute("aria-sort");
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        if (was === "descending") return body.append(...original);
        head.setAttribute("aria-sort", was === "ascending" ? "descending" : "ascending");
        body.append(...order(original, column, was === "ascending" ? -1 : 1));
      });
    });
  }

  // What scrolls sideways can be reached by the keyboard, and says what it is.
  function reachable() {
    for (const box of document.querySelectorAll(".pst-scrollable-table-container, .bd-article figure, .bd-article .cell_output, .bd-article pre, mjx-container[display]")) {
      const scrolls = box.scrollWidth > box.clientWidth + 1 && getComputedStyle(box).overflowX !== "visible";
      if (scrolls) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
      if (scrolls && box.classList.contains("pst-scrollable-table-container")) {
        box.setAttribute("role", "group");
        box.setAttribute("aria-label", "Table, scrolls sideways");
      }
    }
  }

  function start() {
    document.querySelectorAll(".bd-article table").forEach(sortable);
    // The theme's sidebar stands outside of every landmark.
    const sidebar = document.getElementById("pst-primary-sidebar");
    if (sidebar) { sidebar.setAttribute("role", "complementary"); sidebar.setAttribute("aria-label", "Book"); }
    document.querySelectorAll("a.btn-download-source-button").forEach((link) => link.setAttribute("download", ""));
    // Paper is white, and what is folded is printed too.
    const root = document.documentElement;
    let theme = root.dataset.theme;
    let folded = [];
    addEventListener("beforeprint", () => {
      theme = root.dataset.theme;
      root.dataset.theme = "light";
      folded = [...document.querySelectorAll("details:not([open])")];
      folded.forEach((part) => { part.open = true; });
    });
    addEventListener("afterprint", () => {
      root.dataset.theme = theme;
      folded.forEach((part) => { part.open = false; });
    });
    reachable();
    let waiting;
    addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(reachable, 150); });
    addEventListener("load", () => { reachable(); window.MathJax?.startup?.promise?.then(reachable); });
  }

  if (document.readyState === "loading") addEventListener("DOMContentLoaded", start);
  else start();
})();
