"use strict";
// Names of a layer in other systems: the rules of elsi_lib.layers, which data/site.js brings.
(function (Elsi) {
  Elsi.layers = {
    /** The layers that a system can name: all, or all but the last block. */
    servable(convention, n) {
      return Elsi.selection.range(n - (convention.last ? 1 : 0));
    },

    /** {ids} of a layer set, or {reason} why the system has none. */
    ids(name, convention, layers, n) {
      if (convention.last && layers.includes(n - 1)) return { reason: `${name} cannot name layer ${n - 1} of ${n}: ${convention.last}` };
      if (convention.count !== null && convention.count !== layers.length) {
        return { reason: `${name} takes exactly ${convention.count} layers, not the ${layers.length} of (${layers.join(", ")}${layers.length === 1 ? "," : ""})` };
      }
      return { ids: layers.map((j) => j + convention.offset) };
    },

    /** The part of config.json that holds the ids, where a system reads them from there. */
    config(convention, ids) {
      return convention.config && convention.config.reduceRight((inner, key) => ({ [key]: inner }), ids);
    },
  };
})(globalThis.Elsi);
