"use strict";
// What the site brings: a list, and fingerprints as scripts that are loaded when they are asked for (fetch() is barred on file://).
(function (Elsi) {
  const waiting = new Map();

  function fromBase64(text) {
    const binary = atob(text);
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
    return bytes;
  }

  Elsi.data = {
    fingerprints: [],
    conventions: {},

    /** Called by data/site.js. */
    site({ fingerprints, conventions }) {
      Elsi.data.fingerprints = fingerprints;
      Elsi.data.conventions = conventions;
    },

    /** Called by data/NAME.js. */
    receive(name, base64) {
      waiting.get(name)(fromBase64(base64));
    },

    /** The bytes of a fingerprint of the site. */
    load(name, folder) {
      return new Promise((resolve, reject) => {
        const script = document.createElement("script");
        waiting.set(name, resolve);
        script.src = `${folder}/${encodeURIComponent(name)}.js`;
        script.onload = () => script.remove();
        script.onerror = () => {
          script.remove();
          reject(new Elsi.Problem(`the fingerprint ${name} did not load: reload the page, or open a file of your own`));
        };
        document.head.append(script);
      });
    },
  };
})(globalThis.Elsi);
