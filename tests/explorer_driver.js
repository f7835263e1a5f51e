"use strict";
// Answers queries about the explorer's arithmetic: a request as JSON on standard input, the answers on standard output.
const { readFileSync } = require("fs");

const { scripts, file, queries } = JSON.parse(readFileSync(0, "utf8"));
scripts.forEach((script) => require(script));
const { selection, layers: names, cka } = Elsi;

function finish(task) {
  let step = task.next();
  while (!step.done) step = task.next();
  return step.value;
}

function orProblem(make) {
  try {
    return make();
  } catch (error) {
    if (error instanceof Elsi.Problem) return { problem: error.message };
    throw error;
  }
}

let fp;
function fingerprint() {
  fp ??= Elsi.fingerprint.parse(new Uint8Array(readFileSync(file)), "a file");
  return fp;
}

function entropiesOf({ variant, reading }) {
  const { block } = fingerprint();
  const alpha = reading.alpha === "inf" ? Infinity : reading.alpha;
  return new Elsi.Entropies(Elsi.entropy.prepare(fp.grams(...variant), block, reading), block, alpha);
}

const answers = {
  parse: ({ name }) => orProblem(() => Elsi.fingerprint.parse(new Uint8Array(readFileSync(file)), name).sha256),
  sha256: ({ text }) => new Elsi.Sha256().add(new TextEncoder().encode(text)).hex(),
  eigenvalues: ({ packed, n }) => [...new Elsi.Eigenvalues(n).of(packed)],
  wilson: ({ k, n }) => selection.wilson(k, n),
  rule: ({ method, n, m }) => orProblem(() => selection.rule(method, n, m)),

  address({ hash }) {
    const { state, problems } = Elsi.address.read(hash);
    return { hash: Elsi.address.write(state), problems };
  },

  ids({ layers, n }) {
    const of = ([name, rule]) => {
      const { ids, reason } = names.ids(name, rule, layers, n);
      return [name, { named: ids ?? reason, config: ids && names.config(rule, ids), servable: names.servable(rule, n) }];
    };
    return Object.fromEntries(Object.entries(Elsi.data.conventions).map(of));
  },

  wave(query) {
    const own = entropiesOf(query);
    return own.grams.map((_, j) => own.ofSet([j]));
  },

  cka(query) {
    const M = cka.matrix(entropiesOf(query).grams, fp.block, query.debiased);
    return { M: M.map((row) => [...row]), delta: cka.transitions(M), compartments: cka.compartments(M) };
  },

  standings(query) {
    const own = entropiesOf(query);
    const every = query.among ?? selection.range(own.numLayers);
    const all = finish(selection.allSetEntropies(own, query.sets[0].length, every));
    const maps = [false, true].map((debiased) => cka.matrix(fp.grams(...query.variant), fp.block, debiased));
    return query.sets.map((layers) => ({
      entropy: own.ofSet(layers),
      ...selection.standing(layers, all, every),
      redundancy: maps.map((M) => cka.redundancy(M, layers)),
    }));
  },

  choose: (query) => finish(selection.choose(entropiesOf(query), query.method, query.options)),

  stability(query) {
    const { layers } = answers.choose(query);
    return finish(selection.stability(fp, layers, query.method, query.options, query.reading));
  },

  seconds(query) {
    const own = entropiesOf(query);
    const start = performance.now();
    finish(selection.allSetEntropies(own, query.m, selection.range(own.numLayers)));
    return (performance.now() - start) / 1000;
  },
};

process.stdout.write(JSON.stringify(queries.map((query) => answers[query.ask](query))));
