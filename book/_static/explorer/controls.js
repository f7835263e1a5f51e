"use strict";
(function (Elsi) {
  const { html, id } = Elsi.dom;
  const { HAND, FIELDS, applies } = Elsi.address;

  const METHODS = {
    elsi: "ELSI: beam search",
    "elsi-c": "ELSI-C: beam across CKA transitions",
    exhaustive: "exhaustive: the best of all sets",
    lowest: "lowest: the worst of all sets",
    eagle2: "EAGLE-2's rule: the last layer",
    eagle3: "EAGLE-3's rule as printed",
    "eagle3-code": "EAGLE-3's rule as its code runs",
    uniform: "uniform: evenly along depth",
    last: "last: the last layers",
    [HAND]: "by hand",
  };

  /** The form. `change(part of a state)` is called when the reader changes a setting, `open(file)` with a file of theirs. */
  Elsi.controls = function ({ change, open }) {
    const shows = {}; // setting -> function that brings its input to a state
    const boxes = {};

    function labelled(setting, label, input, hint) {
      input.id = id();
      const told = hint && html("small", { id: id() }, hint);
      if (told) input.setAttribute("aria-describedby", told.id);
      return (boxes[setting] = html("div", { class: "elsi-field" }, html("label", { for: input.id }, label), input, told));
    }

    function select(setting, label, options, hint) {
      const [key] = FIELDS[setting];
      const input = html("select", {}, Object.entries(options).map(([value, text]) => html("option", { value }, text)));
      input.addEventListener("change", () => change({ [key]: input.value || null }));
      shows[setting] = (state) => (input.value = state[key] ?? "");
      return labelled(setting, label, input, hint);
    }

    function typed(setting, label, hint) {
      const [key, { read, write }] = FIELDS[setting];
      const input = html("input", { type: "text", inputmode: "text", autocomplete: "off", spellcheck: "false" });
      const wrong = html("small", { class: "elsi-wrong", role: "alert" });
      const box = labelled(setting, label, input, hint);
      box.append(wrong);
      input.addEventListener("change", () => {
        try {
          const value = read(input.value.trim());
          wrong.textContent = "";
          input.removeAttribute("aria-invalid");
          change({ [key]: value });
        } catch (error) {
          wrong.textContent = error.message;
          input.setAttribute("aria-invalid", "true");
        }
      });
      shows[setting] = (state) => {
        input.value = write(state[key]);
        wrong.textContent = "";
        input.removeAttribute("aria-invalid");
      };
      return box;
    }

    function check(setting, label) {
      const [key] = FIELDS[setting];
      const input = html("input", { type: "checkbox", id: id() });
      input.addEventListener("change", () => change({ [key]: input.checked }));
      shows[setting] = (state) => (input.checked = state[key]);
      return (boxes[setting] = html("div", { class: "elsi-check" }, input, html("label", { for: input.id }, label)));
    }

    const target = html("select", { id: id() });
    target.addEventListener("change", () => change({ target: target.value }));
    const file = html("input", { type: "file", accept: ".safetensors", hidden: true, "aria-hidden": "true", tabindex: "-1" });
    file.addEventListener("change", () => {
      if (file.files.length) open(file.files[0]);
      file.value = "";
    });
    const engines = Object.fromEntries(Object.keys(Elsi.data.conventions).filter((name) => name !== "elsi").map((name) => [name, `those that ${name} can capture`]));

    const element = html(
      "form",
      { class: "elsi-controls", onsubmit: (event) => event.preventDefault(), "aria-label": "Settings of the explorer" },
      html(
        "div",
        { class: "elsi-row" },
        html("div", { class: "elsi-field" }, html("label", { for: target.id }, "Target"), target),
        html("div", { class: "elsi-field" }, html("button", { type: "button", onclick: () => file.click() }, "Open your own fingerprint…"), file),
      ),
      html("div", { class: "elsi-row" }, select("method", "Method", METHODS), typed("m", "Layers in the set, m")),
      html("div", { class: "elsi-row" }, check("filtered", "with the token-entropy filter"), check("sink", "with the first position of each prompt")),
      html(
        "details",
        {},
        html("summary", {}, "More settings"),
        html(
          "div",
          { class: "elsi-row" },
          typed("k_beam", "k_beam", "sets kept at each size, or all"),
          typed("k_expand", "k_expand", "layers that extend a set, or all"),
          typed("k_pool", "k_pool", "layers that extend a set, or all"),
          select("after_midpoint", "after_midpoint", { singletons: "single layers", seeds: "seeds at every m", never: "never" }, "where layers before N/2 are barred"),
          select("among", "Choose among", { "": "all layers", ...engines }),
          check("debiased", "debiased CKA in the search"),
        ),
        html(
          "div",
          { class: "elsi-row" },
          typed("alpha", "alpha", "order of the entropy, above 0, or inf"),
          select("normalize", "normalize", { none: "none", trace: "trace: every layer weighs the same" }),
          check("center", "center: subtract the mean row"),
        ),
      ),
    );

    return {
      element,
      /** Bring every input to a state. `targets`: [value, text] of the fingerprints at hand. */
      show(state, shown, targets) {
        if (target.options.length !== targets.length) {
          target.replaceChildren(...targets.map(([value, text]) => html("option", { value }, text)));
        }
        target.value = shown;
        for (const [setting, box] of Object.entries(boxes)) {
          shows[setting](state);
          box.hidden = setting !== "method" && !applies(setting, state);
        }
      },
    };
  };

  /** One toggle button per layer. Arrow keys move along the strip, Home and End to its ends; only one button is a tab stop. */
  Elsi.strip = function (toggle) {
    const element = html("div", { class: "elsi-strip", role: "group", "aria-label": "Layers of the set, decoder blocks counted from 0" });
    const buttons = () => [...element.children];

    function focus(j) {
      const all = buttons();
      const to = Math.min(Math.max(j, 0), all.length - 1);
      all.forEach((button, i) => (button.tabIndex = i === to ? 0 : -1));
      all[to].focus();
    }

    element.addEventListener("keydown", (event) => {
      const all = buttons();
      const at = all.indexOf(document.activeElement);
      const perRow = all.filter((button) => button.offsetTop === all[0].offsetTop).length;
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - perRow, ArrowDown: at + perRow, Home: 0, End: all.length - 1 }[event.key];
      if (at < 0 || to === undefined) return;
      event.preventDefault();
      focus(to);
    });
    element.addEventListener("click", (event) => {
      const at = buttons().indexOf(event.target.closest("button"));
      if (at < 0) return;
      focus(at);
      toggle(at);
    });

    return {
      element,
      show(n, chosen) {
        if (element.children.length !== n) {
          element.replaceChildren(
            ...Elsi.selection.range(n).map((j) => html("button", { type: "button", tabindex: j ? "-1" : "0", "aria-label": `layer ${j}` }, String(j))),
          );
        }
        buttons().forEach((button, j) => button.setAttribute("aria-pressed", String(chosen.includes(j))));
      },
    };
  };
})(globalThis.Elsi);
