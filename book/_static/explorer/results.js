"use strict";
(function (Elsi) {
  const { html, number, copyButton } = Elsi.dom;
  const { braces, count } = Elsi;
  const { HAND, applies } = Elsi.address;

  const NAMES = {
    elsi: "ELSI",
    "elsi-c": "ELSI-C",
    exhaustive: "trying all sets",
    lowest: "trying all sets for the lowest",
    eagle2: "EAGLE-2's rule",
    eagle3: "EAGLE-3's rule as printed",
    "eagle3-code": "EAGLE-3's rule as its code runs",
    uniform: "spacing them evenly",
    last: "taking the last",
  };

  const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 1 && (1000 * share) % 10 ? 1 : 0)} %`;

  /** JSON on one line, as Python writes it. */
  const toJson = (value) =>
    Array.isArray(value)
      ? `[${value.map(toJson).join(", ")}]`
      : value !== null && typeof value === "object"
        ? `{${Object.entries(value).map(([key, inner]) => `${JSON.stringify(key)}: ${toJson(inner)}`).join(", ")}}`
        : JSON.stringify(value);

  function progressBar(label) {
    const bar = html("progress", { max: 1, value: 0, "aria-label": label });
    return { element: html("span", { class: "elsi-progress" }, bar, ` ${label}`), set: (share) => (bar.value = share) };
  }

  const shell = (word) => (/^[\w./@-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

  /** What gives the same on the command line or, where that has no words for it, in Python. */
  function command(path, state, layers) {
    const python = state.method === HAND || (state.method === "elsi-c" && state.debiased);
    const alpha = state.alpha === Infinity ? "inf" : String(state.alpha);
    if (!python) {
      const limit = (value) => (value === null ? "all" : String(value));
      const words = ["elsi", "select", shell(path)];
      if (applies("m", state)) words.push("-m", String(state.m));
      if (state.method !== "elsi") words.push("--method", state.method);
      if (applies("k_beam", state) && state.kBeam !== 10) words.push("--k-beam", limit(state.kBeam));
      if (applies("k_expand", state) && state.kExpand !== 10) words.push("--k-expand", limit(state.kExpand));
      if (applies("k_pool", state) && state.kPool !== 10) words.push("--k-pool", limit(state.kPool));
      if (applies("after_midpoint", state) && state.afterMidpoint !== "singletons") words.push("--after-midpoint", state.afterMidpoint);
      if (applies("among", state) && state.among) words.push("--engine", state.among);
      if (state.alpha !== 1) words.push("--alpha", alpha);
      if (state.center) words.push("--center");
      if (state.normalize !== "none") words.push("--normalize", state.normalize);
      if (!state.filtered) words.push("--unfiltered");
      if (!state.sink) words.push("--drop-first");
      return words.join(" ");
    }
    const reading = [];
    if (state.alpha !== 1) reading.push(`alpha=${state.alpha === Infinity ? 'float("inf")' : alpha}`);
    if (state.center) reading.push("center=True");
    if (state.normalize !== "none") reading.push(`normalize="${state.normalize}"`);
    const variant = state.filtered && state.sink ? "" : `.variant(filtered=${state.filtered ? "True" : "False"}, sink=${state.sink ? "True" : "False"})`;
    const lines = [`from elsi_lib import Fingerprint${state.method === HAND ? "" : ", elsi_c"}`, `fp = Fingerprint.load(${JSON.stringify(path)})${variant}`];
    if (state.method === HAND) {
      lines.push(`print(fp.entropy(${[`[${layers.join(", ")}]`, ...reading].join(", ")}))`);
    } else {
      const options = [`k_beam=${state.kBeam ?? "None"}`, `k_pool=${state.kPool ?? "None"}`, `after_midpoint="${state.afterMidpoint}"`, "debiased=True"];
      if (state.among) {
        lines.splice(1, 0, "from elsi_lib.layers import servable_layers");
        options.push(`among=servable_layers("${state.among}", fp.num_layers)`);
      }
      lines.push(`print(elsi_c(fp, ${[state.m, ...options, ...reading].join(", ")}))`);
    }
    return lines.join("\n");
  }

  const snippet = (what, text) => html("div", { class: "elsi-snippet" }, html("pre", { tabindex: "0" }, html("code", {}, text)), copyButton(what, text));

  /** Everything the page says about a layer set. */
  Elsi.results = function () {
    const said = html("p", { class: "elsi-said", role: "status", "aria-live": "polite" });
    const facts = {};
    const fact = (key, label) => html("div", {}, html("dt", {}, label), (facts[key] = html("dd", {})));
    const list = html(
      "dl",
      { class: "elsi-facts" },
      fact("entropy", "entropy of the set"),
      fact("place", "place among all sets of its size"),
      fact("regret", "regret, distance to the best"),
      fact("servable", "among the sets the engine can capture"),
      fact("redundancy", "redundancy, mean CKA of its pairs"),
      fact("stability", "stability over redraws of the prompts"),
    );
    const compared = html("tbody");
    const engines = html("div", { class: "elsi-engines" });
    const again = html("div");

    const put = (key, ...content) => facts[key].replaceChildren(...content);

    return {
      said,
      facts: list,
      compared: html(
        "table",
        { class: "table elsi-compared" },
        html("thead", {}, html("tr", {}, ["compared with", "layers", "nats", "gain"].map((name) => html("th", { scope: "col" }, name)))),
        compared,
      ),
      engines,
      again,

      /** No set, and why. */
      problem(message) {
        said.textContent = message;
        for (const key of Object.keys(facts)) put(key, "–");
        facts.servable.parentElement.hidden = true;
        [compared, engines, again].forEach((element) => element.replaceChildren());
      },

      choosing(label) {
        const bar = progressBar(label);
        said.replaceChildren(bar.element);
        for (const key of Object.keys(facts)) put(key, "…");
        return bar.set;
      },

      /** The set itself: what needs no other sets. */
      chosen({ state, symbol, layers, entropy, M, n, path, title }) {
        said.replaceChildren(html("strong", {}, braces(layers)), ` ${state.method === HAND ? "chosen by hand" : `chosen by ${NAMES[state.method]}`} from ${title}: ${symbol} = ${entropy.toFixed(4)} nats.`);
        put("entropy", `${symbol} = `, number(entropy), " nats");
        for (const later of ["place", "regret", "stability"]) put(later, "…");
        if (layers.length < 2) put("redundancy", "one layer has no pairs");
        else {
          const parts = Object.entries(M).flatMap(([estimator, own]) =>
            own.problem ? [`${estimator}: ${own.problem}`, html("br")] : [`${estimator} `, number(Elsi.cka.redundancy(own.M, layers), 3), html("br")],
          );
          put("redundancy", ...parts.slice(0, -1));
        }
        facts.servable.parentElement.hidden = true;
        this._engines(layers, n);
        again.replaceChildren(snippet("the command", command(path, state, layers)));
      },

      /** A computation that goes on: a bar in the place of its result. */
      working(key, label) {
        const bar = progressBar(label);
        put(key, bar.element);
        if (key === "place") put("regret", "…");
        return bar.set;
      },

      place({ rank, sets, optimum, best, regret }, m, n, baselines, entropy) {
        put("place", html("data", { value: rank }, count(rank)), ` of ${count(sets)} sets of ${m} of ${n} layers`);
        put("regret", ...(rank > 1 ? [number(regret), ` nats below ${braces(optimum)}`] : ["none: it is the best there is"]));
        this._compared([...baselines, { name: `best of ${count(sets)} sets`, layers: optimum, entropy: best }], entropy);
        said.append(` Place ${count(rank)} of ${count(sets)}${rank > 1 ? `, ${regret.toFixed(4)} nats below the best` : ", the best there is"}.`);
      },

      noPlace(why, baselines, entropy) {
        put("place", why);
        put("regret", "–");
        this._compared(baselines, entropy);
      },

      servable(own, engine) {
        facts.servable.parentElement.hidden = false;
        if (own.note) put("servable", own.note);
        else put("servable", `${engine}: place ${count(own.rank)} of ${count(own.sets)}`, ...(own.rank > 1 ? [", ", number(own.regret), " nats below the best"] : []));
      },

      stability({ share, interval, jaccard, replicates }) {
        put(
          "stability",
          html("data", { value: share }, percent(share)),
          ` of ${replicates} redraws choose the same set (95 % interval ${interval.map(percent).join(" to ")}); mean Jaccard similarity `,
          number(jaccard, 3),
        );
      },

      noStability(why) {
        put("stability", why);
      },

      _compared(rows, entropy) {
        compared.replaceChildren(
          ...rows.map(({ name, layers, entropy: own, problem }) =>
            html(
              "tr",
              {},
              html("th", { scope: "row" }, name),
              problem
                ? html("td", { colspan: 3 }, problem)
                : [html("td", {}, braces(layers)), html("td", {}, number(own)), html("td", {}, entropy >= own ? "+" : "", number(entropy - own))],
            ),
          ),
        );
      },

      _engines(layers, n) {
        const open = new Set([...engines.querySelectorAll("details[open]")].map((details) => details.dataset.name));
        engines.replaceChildren(
          ...Object.entries(Elsi.data.conventions).filter(([name]) => name !== "elsi").map(([name, convention]) => {
            const { ids, reason } = Elsi.layers.ids(name, convention, layers, n);
            const config = ids && Elsi.layers.config(convention, ids);
            return html(
              "section",
              { class: "elsi-engine", "aria-label": name },
              html("h3", {}, name),
              ids ? html("p", {}, "ids ", html("strong", {}, ids.join(", "))) : html("p", { class: "elsi-reason" }, reason),
              config ? snippet(`config.json for ${name}`, toJson(config)) : null,
              convention.config
                ? html("details", { "data-name": name, open: open.has(name) }, html("summary", {}, "what its code does"), html("p", {}, convention.note))
                : html("p", { class: "elsi-reason" }, convention.note), // without a key of config.json the ids alone would mislead
            );
          }),
        );
      },
    };
  };
})(globalThis.Elsi);
