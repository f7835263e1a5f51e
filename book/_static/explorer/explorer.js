"use strict";
// The page: its state lives in the address, and everything shown follows from it.
(function (Elsi) {
  const { html } = Elsi.dom;
  const { HAND } = Elsi.address;
  const { RULES, EXHAUSTIVE_LIMIT, STABILITY_LIMIT, binomial, range } = Elsi.selection;
  const FOLDER = new URL("data", document.currentScript.src).href;
  const BASELINES = { eagle2: "EAGLE-2", eagle3: "EAGLE-3 as printed", "eagle3-code": "EAGLE-3 as its code runs" };
  const SHORT_HASH = 16;

  const root = document.getElementById("elsi-explorer");
  /** Fingerprints read so far: value of the target in the address -> {fingerprint, title, path, known}. */
  const loaded = new Map();
  let state = Elsi.address.defaults();
  let shown = null; // the entry of `loaded` on the page
  let drawn = {}; // what the plots show
  let width = 0; // of the plots, pixels
  let frame = 0;
  let turn = 0;
  let stop = () => {};

  const controls = Elsi.controls({ change, open: openFile });
  const strip = Elsi.strip(toggle);
  const results = Elsi.results();
  const notice = html("div", { class: "elsi-notice", role: "alert" });
  const about = html("p", { class: "elsi-about" });
  const plots = Object.fromEntries(["wave", "shares", "map"].map((name) => [name, html("div", { class: `elsi-${name}` })]));
  const readout = html("output", { class: "elsi-readout" });
  const runs = html("p");
  const estimator = html("select", { id: Elsi.dom.id() }, html("option", { value: "plain" }, "plain"), html("option", { value: "debiased" }, "debiased"));
  const key = html("p", { class: "elsi-key" });

  // Reading

  function notify(...messages) {
    notice.replaceChildren(...messages.map((message) => html("p", {}, message)));
  }

  /** The fingerprint of a target, read once. */
  async function entryOf(target) {
    if (!loaded.has(target)) {
      const { name } = Elsi.data.fingerprints.find((own) => own.name === target);
      const fingerprint = Elsi.fingerprint.parse(await Elsi.data.load(name, FOLDER), `${name}.js`);
      loaded.set(name, { fingerprint, title: name, path: `data/results/${name}/fingerprint.safetensors`, known: new Map() });
    }
    return loaded.get(target);
  }

  const isKnown = (target) => loaded.has(target) || Elsi.data.fingerprints.some(({ name }) => name === target);

  /** The target to show, and a sentence if it is not the one the address names. */
  function resolve() {
    const first = Elsi.data.fingerprints[0]?.name ?? loaded.keys().next().value;
    if (state.target === null || isKnown(state.target)) return { target: state.target ?? first };
    const own = state.target.startsWith("own:");
    const what = own
      ? `This address shows a fingerprint that is not part of the site (sha256 ${state.target.slice(4)}…): open that file here to see it.`
      : `There is no fingerprint "${state.target}" on this site.`;
    return { target: first, note: first ? `${what} Until then this is ${first}.` : what };
  }

  async function openFile(file) {
    try {
      const fingerprint = await Elsi.fingerprint.open(file);
      const target = `own:${fingerprint.sha256.slice(0, SHORT_HASH)}`;
      const title = `${fingerprint.target} (${file.name})`;
      if (!loaded.has(target)) loaded.set(target, { fingerprint, title, path: file.name, known: new Map() });
      notify();
      if (state.target === target) show();
      else change({ target });
    } catch (error) {
      if (!(error instanceof Elsi.Problem)) throw error;
      notify(`${error.message}.`);
    }
  }

  // The address

  function change(part) {
    state = { ...state, ...part };
    const hash = Elsi.address.write(state);
    if (hash !== location.hash) history.pushState(null, "", hash || location.pathname + location.search);
    notify();
    show();
  }

  function readAddress() {
    const { hash } = location;
    if (hash && !hash.includes("=")) return; // an anchor of the page
    const { state: found, problems } = Elsi.address.read(hash);
    if (found.among !== null && !(found.among in Elsi.data.conventions)) {
      problems.push(`among=${found.among} in the address: there is no such engine`);
      found.among = null;
    }
    state = found;
    notify(...problems);
    show();
  }

  function toggle(layer) {
    const now = drawn.chosen ?? [];
    const layers = now.includes(layer) ? now.filter((j) => j !== layer) : [...now, layer].sort((a, b) => a - b);
    change({ method: HAND, layers });
  }

  // Computing

  /** What follows from a fingerprint is computed once. */
  function remember(name, make) {
    if (!shown.known.has(name)) shown.known.set(name, make());
    return shown.known.get(name);
  }

  async function inSlices(name, makeTask, makeProgress) {
    if (!shown.known.has(name)) {
      const { known } = shown;
      const work = Elsi.runInSlices(makeTask(), makeProgress());
      stop = work.stop;
      known.set(name, await work.result);
    }
    return shown.known.get(name);
  }

  function mapsOf(variant) {
    const grams = shown.fingerprint.grams(...variant);
    const map = (debiased) => {
      try {
        const M = Elsi.cka.matrix(grams, shown.fingerprint.block, debiased);
        return { M, compartments: Elsi.cka.compartments(M) };
      } catch (error) {
        if (!(error instanceof Elsi.Problem)) throw error;
        return { problem: error.message };
      }
    };
    return { plain: map(false), debiased: map(true) };
  }

  function baselines(entropies) {
    return Object.entries(BASELINES).map(([rule, name]) => {
      try {
        const layers = Elsi.selection.rule(rule, entropies.numLayers);
        return { name, layers, entropy: entropies.ofSet(layers) };
      } catch (error) {
        if (!(error instanceof Elsi.Problem)) throw error;
        return { name, problem: error.message };
      }
    });
  }

  /** Shows what the state asks for. The page's data-state is "ready" when all of it is there, for those who drive it by a program. */
  async function show() {
    const mine = ++turn;
    const stale = () => mine !== turn;
    stop();
    root.dataset.state = "computing";
    try {
      await showTurn(stale);
    } catch (error) {
      if (!(error instanceof Elsi.Problem)) throw error;
      if (stale()) return;
      results.problem(`${error.message}.`);
      draw({ chosen: [] });
    }
    if (!stale()) root.dataset.state = "ready";
  }

  async function showTurn(stale) {
    const { target, note } = resolve();
    if (!target) {
      notify("No fingerprint comes with this site yet: `make book` makes one. Your own can be opened here.", ...(note ? [note] : []));
      controls.show(state, "", []);
      return;
    }
    if (note) notify(note);
    const entry = await entryOf(target);
    if (stale()) return;
    shown = entry;
    await compute(target, stale);
  }

  async function compute(target, stale) {
    const { fingerprint, title, path } = shown;
    const n = fingerprint.numLayers;
    const { alpha, center, normalize, method, filtered, sink } = state;
    const reading = { alpha, center, normalize };
    const readingKey = [filtered, sink, alpha, center, normalize].join();
    const symbol = `S${alpha === 1 ? "₁" : alpha === Infinity ? "∞" : `(α = ${alpha})`}`;

    controls.show(state, target, targets());
    describe(fingerprint);
    drawn = { title, n, chosen: drawn.title === title ? drawn.chosen : [] }; // nothing of another target or reading stays
    const maps = remember(`maps ${filtered} ${sink}`, () => mapsOf([filtered, sink]));
    const { entropies, wave } = remember(`wave ${readingKey}`, () => {
      const own = new Elsi.Entropies(Elsi.entropy.prepare(fingerprint.grams(filtered, sink), fingerprint.block, reading), fingerprint.block, alpha);
      return { entropies: own, wave: range(n).map((j) => own.ofSet([j])) };
    });
    Object.assign(drawn, { wave, maps, symbol });
    const allowed = state.among && Elsi.address.applies("among", state) ? Elsi.layers.servable(Elsi.data.conventions[state.among], n) : range(n);
    const options = { ...state, allowed };
    const choiceKey = Elsi.address.write({ ...state, target: null, map: "plain" });

    let chosen;
    if (method === HAND || RULES.includes(method)) {
      const layers = method === HAND ? Elsi.selection.checkLayers(state.layers, n, title) : Elsi.selection.rule(method, n, state.m);
      chosen = { layers, entropy: entropies.ofSet(layers) };
    } else {
      draw({});
      const task = () => Elsi.selection.choose(entropies, method, options);
      chosen = await inSlices(`choice ${choiceKey}`, task, () => results.choosing(`${method} is searching`));
      if (stale()) return;
    }
    const { layers, entropy } = chosen;
    const m = layers.length;
    results.chosen({ state, symbol, layers, entropy, M: maps, n, path, title });
    draw({ chosen: layers });

    await place();
    if (stale()) return;
    await stability();

    async function place() {
      const rivals = remember(`baselines ${readingKey}`, () => baselines(entropies));
      const sets = binomial(n, m);
      const everyTask = (from) => () => Elsi.selection.allSetEntropies(entropies, m, from);
      const working = () => results.working("place", `trying all sets of ${m}`);
      if (sets > EXHAUSTIVE_LIMIT) {
        results.noPlace(`${Elsi.count(sets)} sets of ${m} of ${n} layers are too many to compare with`, rivals, entropy);
      } else {
        const all = await inSlices(`all ${m} ${readingKey}`, everyTask(range(n)), working);
        if (stale()) return;
        const standing = Elsi.selection.standing(layers, all, range(n));
        results.place(standing, m, n, rivals, entropy);
        if (standing.rank > 1) draw({ optimum: standing.optimum });
      }
      if (allowed.length === n) return;
      const fewer = binomial(allowed.length, m);
      if (fewer > EXHAUSTIVE_LIMIT) {
        results.servable({ note: `${Elsi.count(fewer)} sets of ${m} of ${allowed.length} layers are too many to compare with` });
        return;
      }
      const all = await inSlices(`all ${m} ${readingKey} ${state.among}`, everyTask(allowed), () => () => {});
      if (!stale()) results.servable(Elsi.selection.standing(layers, all, allowed), state.among);
    }

    async function stability() {
      const searched = ["exhaustive", "lowest"].includes(method);
      const cost = binomial(n, m) * fingerprint.replicates;
      if (method === HAND) return results.noStability("a set chosen by hand does not depend on the prompts");
      if (RULES.includes(method)) return results.noStability("a fixed rule does not depend on the prompts");
      if (!filtered || !sink) return results.noStability("the bootstrap is of the default variant only");
      if (!fingerprint.replicates) return results.noStability("calibrated without bootstrap");
      if (searched && cost > STABILITY_LIMIT) return results.noStability(`${Elsi.count(cost)} set entropies would take minutes: see the method elsi`);
      const task = () => Elsi.selection.stability(fingerprint, layers, method, options, reading);
      const found = await inSlices(`stability ${choiceKey}`, task, () => results.working("stability", `${fingerprint.replicates} redraws`));
      if (stale()) return;
      results.stability(found);
      draw({ stability: found });
    }
  }

  // Showing

  function targets() {
    const site = Elsi.data.fingerprints.map(({ name, layers }) => [name, `${name}, ${layers} layers`]);
    const own = [...loaded].filter(([target]) => target.startsWith("own:")).map(([target, { title, fingerprint }]) => [target, `${title}, ${fingerprint.numLayers} layers`]);
    return [...site, ...own];
  }

  function describe({ passport, block, replicates, sha256 }) {
    const { target, prompts, parameters } = passport;
    const parts = [
      target.name,
      `${prompts.used ?? "?"} prompts of ${prompts.source ?? "unnamed prompts"}`,
      `ρ ${parameters.rho}`,
      `B ${block}`,
      target.dtype,
      replicates ? `${replicates} bootstrap replicates` : "no bootstrap",
      `sha256 ${sha256.slice(0, SHORT_HASH)}`,
    ];
    about.textContent = parts.filter(Boolean).join(" · ");
  }

  /** Draw what is known now, once per frame however often it changes. */
  function draw(next) {
    Object.assign(drawn, next);
    if (drawn.n) strip.show(drawn.n, drawn.chosen);
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      drawWave();
      drawMap();
    });
  }

  function drawWave() {
    const { wave, chosen, optimum, stability, symbol, title } = drawn;
    plots.wave.replaceChildren(...(wave ? [Elsi.plots.wave(width, { wave, chosen, optimum, symbol, target: title })] : []));
    key.hidden = !optimum;
    key.textContent = optimum ? `◇ ${Elsi.braces(optimum)}, the best set of this size` : "";
    plots.shares.parentElement.hidden = !stability;
    if (stability) plots.shares.replaceChildren(Elsi.plots.shares(width, { ...stability, chosen }));
  }

  function drawMap() {
    const { maps, chosen, title } = drawn;
    if (!maps) return;
    const { M, compartments, problem } = maps[state.map];
    estimator.value = state.map;
    if (problem) {
      plots.map.replaceChildren(problem);
      runs.textContent = "";
      return;
    }
    const plot = Elsi.plots.map(width, { M, compartments, chosen, estimator: state.map, target: title });
    plot.addEventListener("pointermove", (event) => {
      const pair = plot.pairAt(event);
      readout.textContent = pair ? `layers ${pair[0]} and ${pair[1]}: ${M[pair[0]][pair[1]].toFixed(3)}` : "";
    });
    plots.map.replaceChildren(plot);
    const names = compartments.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`));
    const pairs = chosen.flatMap((i, at) => chosen.slice(at + 1).map((j) => `${i} and ${j}: ${M[i][j].toFixed(3)}`));
    runs.textContent = `Compartments: ${names.join(", ")}.${pairs.length && pairs.length <= 10 ? ` CKA of the chosen pairs: ${pairs.join("; ")}.` : ""}`;
  }

  function build() {
    estimator.addEventListener("change", () => change({ map: estimator.value }));
    plots.wave.addEventListener("click", (event) => {
      const { layer } = event.target.dataset;
      if (layer !== undefined) toggle(Number(layer));
    });
    const heading = (text) => html("h2", {}, text);
    root.replaceChildren(
      controls.element,
      notice,
      about,
      results.said,
      plots.wave,
      key,
      strip.element,
      html("div", { hidden: true }, html("p", { class: "elsi-caption" }, "How often each layer is chosen when the prompts are drawn again:"), plots.shares),
      results.facts,
      results.compared,
      heading("CKA between the layers"),
      html("div", { class: "elsi-field elsi-inline" }, html("label", { for: estimator.id }, "Estimator of the map"), estimator),
      plots.map,
      readout,
      runs,
      heading("Ids for every engine"),
      results.engines,
      heading("The same without this page"),
      results.again,
    );
    root.hidden = false;

    const files = (event) => event.dataTransfer && [...event.dataTransfer.types].includes("Files");
    addEventListener("dragover", (event) => {
      if (!files(event)) return;
      event.preventDefault();
      root.classList.add("elsi-dropping");
    });
    addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) root.classList.remove("elsi-dropping");
    });
    addEventListener("drop", (event) => {
      if (!files(event)) return;
      event.preventDefault();
      root.classList.remove("elsi-dropping");
      openFile(event.dataTransfer.files[0]);
    });
    const measure = () => (width = Math.max(260, root.clientWidth));
    measure();
    new ResizeObserver(() => {
      if (width !== measure()) draw({});
    }).observe(root);
    addEventListener("popstate", readAddress);
    readAddress();
  }

  // After the page's own scripts, which make the tables sortable that they find.
  addEventListener("DOMContentLoaded", build);
})(globalThis.Elsi);
