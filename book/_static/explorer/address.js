"use strict";
// The whole state of the page in the address: what differs from the defaults, in the library's names.
(function (Elsi) {
  const { RULES, FIXED } = Elsi.selection;
  const HAND = "by hand";
  const METHODS = ["elsi", "elsi-c", "exhaustive", "lowest", ...RULES, HAND];
  const BEAMS = ["elsi", "elsi-c"];

  const bad = (text, want) => {
    throw new Elsi.Problem(`"${text}" is not ${want}`);
  };
  const oneOf = (...values) => ({
    read: (text) => (values.includes(text) ? text : bad(text, `one of ${values.join(", ")}`)),
    write: String,
  });
  const flag = { read: (text) => ({ 0: false, 1: true })[text] ?? bad(text, "0 or 1"), write: (value) => (value ? "1" : "0") };
  const whole = { read: (text) => (/^[1-9]\d{0,5}$/.test(text) ? Number(text) : bad(text, "a whole number above 0")), write: String };
  const limit = {
    read: (text) => (text === "all" ? null : /^[1-9]\d{0,5}$/.test(text) ? Number(text) : bad(text, 'a whole number above 0, or "all"')),
    write: (value) => (value === null ? "all" : String(value)),
  };
  const alpha = {
    read(text) {
      const value = text === "inf" ? Infinity : /^\d*\.?\d+(e-?\d+)?$/i.test(text) ? Number(text) : NaN;
      return value > 0 ? value : bad(text, "a number above 0, or inf");
    },
    write: (value) => (value === Infinity ? "inf" : String(value)),
  };
  const layers = {
    read: (text) => (/^\d+(,\d+)*$/.test(text) ? text.split(",").map(Number).sort((a, b) => a - b) : text === "none" ? [] : bad(text, "layers like 1,12,13")),
    write: (value) => value?.join(",") || (value ? "none" : ""),
  };
  const name = { read: String, write: (value) => value ?? "" };

  const always = () => true;
  // name in the address: [name in the state, how it is written, default, whether it means anything in a state]
  const FIELDS = {
    target: ["target", name, null, always],
    layers: ["layers", layers, null, (state) => state.method === HAND],
    method: ["method", oneOf(...METHODS.filter((name) => name !== HAND)), "elsi", (state) => state.method !== HAND],
    m: ["m", whole, 3, (state) => state.method !== HAND && !FIXED.includes(state.method)],
    k_beam: ["kBeam", limit, 10, (state) => BEAMS.includes(state.method)],
    k_expand: ["kExpand", limit, 10, (state) => state.method === "elsi"],
    k_pool: ["kPool", limit, 10, (state) => state.method === "elsi-c"],
    after_midpoint: ["afterMidpoint", oneOf("singletons", "seeds", "never"), "singletons", (state) => BEAMS.includes(state.method)],
    debiased: ["debiased", flag, false, (state) => state.method === "elsi-c"],
    among: ["among", name, null, (state) => state.method !== HAND && !RULES.includes(state.method)],
    alpha: ["alpha", alpha, 1, always],
    center: ["center", flag, false, always],
    normalize: ["normalize", oneOf("none", "trace"), "none", always],
    filtered: ["filtered", flag, true, always],
    sink: ["sink", flag, true, always],
    map: ["map", oneOf("plain", "debiased"), "plain", always],
  };

  Elsi.address = {
    HAND,
    FIELDS,

    /** Whether a setting means anything to the method of a state. */
    applies: (name, state) => FIELDS[name][3](state),

    defaults: () => Object.fromEntries(Object.values(FIELDS).map(([key, , value]) => [key, value])),

    /** State of an address, and what in it could not be read. An anchor of the page, #like-this, is no state. */
    read(hash) {
      const state = Elsi.address.defaults();
      const problems = [];
      for (const part of hash.replace(/^#/, "").split("&")) {
        if (!part.includes("=")) continue;
        const [name, ...rest] = part.split("=");
        try {
          if (!(name in FIELDS)) throw new Elsi.Problem("there is no such setting");
          const [key, { read }] = FIELDS[name];
          state[key] = read(decodeURIComponent(rest.join("=")));
          if (name === "layers") state.method = HAND;
        } catch (error) {
          const why = error instanceof Elsi.Problem ? error.message : "it cannot be decoded";
          problems.push(`${part} in the address: ${why}`);
        }
      }
      return { state, problems };
    },

    write(state) {
      const parts = [];
      for (const [name, [key, { write }, usual, means]] of Object.entries(FIELDS)) {
        if (!means(state)) continue;
        const value = write(state[key]);
        if (value !== write(usual)) parts.push(`${name}=${encodeURIComponent(value).replaceAll("%2C", ",")}`);
      }
      return parts.length ? `#${parts.join("&")}` : "";
    },
  };
})(globalThis.Elsi);
