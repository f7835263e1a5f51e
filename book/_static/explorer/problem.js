"use strict";
// One namespace for the page: classic scripts in order, because modules do not load from file://.
globalThis.Elsi ??= {};

(function (Elsi) {
  /** An input that cannot be used; its message is for the reader of the page. */
  Elsi.Problem = class Problem extends Error {};

  const commas = new Intl.NumberFormat("en-US");
  /** 7140 -> "7,140". */
  Elsi.count = (n) => commas.format(n);
  /** [1, 12] -> "{1, 12}". */
  Elsi.braces = (layers) => `{${layers.join(", ")}}`;
})(globalThis.Elsi);
