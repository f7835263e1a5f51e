"use strict";
// Elements of the page. Text from files goes in as text nodes only, never as markup.
(function (Elsi) {
  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return element;
  }

  let last = 0;

  Elsi.dom = {
    html: (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children),
    svg: (tag, attributes = {}, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children),
    id: () => `elsi-${++last}`,

    /** A number, shown rounded, with all its digits in the element's value. */
    number: (value, digits = 4) => Elsi.dom.html("data", { value }, value.toFixed(digits).replace("-", "\u2212")),

    /** A button that puts a text on the clipboard and says so. */
    copyButton(what, text) {
      const button = Elsi.dom.html("button", { type: "button", class: "elsi-copy", "aria-label": `Copy ${what}` }, "Copy");
      button.addEventListener("click", async () => {
        button.textContent = (await copy(text)) ? "Copied" : "Select and copy by hand";
        setTimeout(() => (button.textContent = "Copy"), 2000);
      });
      return button;
    },
  };

  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const area = Elsi.dom.html("textarea", { class: "elsi-offscreen", "aria-hidden": "true", tabindex: "-1" }, text);
      const before = document.activeElement;
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      before?.focus();
      return done;
    }
  }
})(globalThis.Elsi);
