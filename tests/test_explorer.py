"""The layer explorer's arithmetic, run under Node, against the library: the same numbers to 1e-9 and the same sets."""

import hashlib
import itertools
import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from synthetic import fingerprint as synthetic

from elsi_lib.choice import describe_choice
from elsi_lib.cka import compartments, find_boundaries, transition_scores
from elsi_lib.errors import ElsiError
from elsi_lib.fingerprint import Fingerprint
from elsi_lib.layers import CONVENTIONS, engine_ids, servable_layers
from elsi_lib.selection import RULES, layer_rule, select, stability, standing

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "book" / "_static" / "explorer"
SCRIPTS = ("problem", "linalg", "safetensors", "sha256", "fingerprint", "entropy", "cka", "selection", "layers", "data", "address")
COMMITTED = sorted((ROOT / "data" / "results").glob("*/fingerprint.safetensors"))
VARIANTS = list(itertools.product((True, False), repeat=2))
PLAIN = {"alpha": 1.0, "center": False, "normalize": "none"}
READINGS = [PLAIN, PLAIN | {"center": True}, PLAIN | {"normalize": "trace"}]
READINGS += [PLAIN | {"center": True, "normalize": "trace", "alpha": 2.0}]
READINGS += [PLAIN | {"alpha": alpha} for alpha in (0.5, 1.0001, 4.0, math.inf)]

@pytest.fixture(scope="session")
def ask(site_data):
    """Run queries in one Node process: ``ask(path, [query, ...]) -> [answer, ...]``."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: the explorer's arithmetic is tested where it is")
    scripts = [*(str(FOLDER / f"{name}.js") for name in SCRIPTS), str(site_data)]

    def run(file, queries):
        queries = [query | {"reading": _json(query["reading"])} if "reading" in query else query for query in queries]
        request = json.dumps({"scripts": scripts, "file": str(file), "queries": queries}, allow_nan=False)
        driver = ROOT / "tests" / "explorer_driver.js"
        found = subprocess.run([node, driver], input=request, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr[-3000:]
        return json.loads(found.stdout)

    return run


def _json(reading):
    return reading | {"alpha": "inf" if reading["alpha"] == math.inf else reading["alpha"]}


@pytest.fixture(scope="session")
def site_data(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "workflow")
        from explorer_data import explorer_data
    path = tmp_path_factory.mktemp("data") / "site.js"
    path.write_bytes(explorer_data([ROOT / "data" / "results"])["site.js"])
    return path


@pytest.fixture(scope="session")
def deep(tmp_path_factory):
    """36 layers, B = 32: the depth of the paper's larger target."""
    path = tmp_path_factory.mktemp("deep") / "deep.safetensors"
    return synthetic(layers=36, hidden=48, prompts=5, length=220, block=32, bootstrap=4, name="deep").save(path)


@pytest.fixture(params=[*(path.parent.name for path in COMMITTED), "36 layers"])
def path(request, deep):
    return deep if request.param == "36 layers" else ROOT / "data" / "results" / request.param / "fingerprint.safetensors"


def close(given, expected, tolerance=1e-9):
    given, expected = (torch.as_tensor(values, dtype=torch.float64) for values in (given, expected))
    torch.testing.assert_close(given, expected, atol=tolerance, rtol=0)


def test_entropies_of_single_layers(ask, path):
    fp = Fingerprint.load(path)
    cases = list(itertools.product(VARIANTS, READINGS))
    found = ask(path, [{"ask": "wave", "variant": variant, "reading": reading} for variant, reading in cases])
    for (variant, reading), wave in zip(cases, found, strict=True):
        close(wave, fp.variant(*variant).entropy(**reading))


def test_cka_transitions_and_compartments(ask, path):
    fp = Fingerprint.load(path)
    cases = list(itertools.product(VARIANTS, (False, True)))
    found = ask(path, [{"ask": "cka", "variant": variant, "reading": PLAIN, "debiased": debiased} for variant, debiased in cases])
    for (variant, debiased), own in zip(cases, found, strict=True):
        M = fp.variant(*variant).cka(debiased)
        delta = transition_scores(M)
        close(own["M"], M)
        close(own["delta"], delta, 1e-8)
        assert own["compartments"] == [list(run) for run in compartments(find_boundaries(delta), fp.num_layers)]


def test_place_and_regret_of_many_sets(ask, path):
    fp = Fingerprint.load(path)
    generator = torch.Generator().manual_seed(1)
    for variant, reading, m in [((True, True), PLAIN, 3), ((True, False), READINGS[3], 2), ((False, True), READINGS[1], 1)]:
        sets = [sorted(torch.randperm(fp.num_layers, generator=generator)[:m].tolist()) for _ in range(8)]
        own = fp.variant(*variant)
        answer = ask(path, [{"ask": "standings", "variant": variant, "reading": reading, "sets": sets}])[0]
        for layers, found in zip(sets, answer, strict=True):
            chosen = _described(own, layers, reading)
            close(found["entropy"], chosen["entropy"])
            close(found["regret"], chosen["regret"])
            assert (found["rank"], found["sets"], found["optimum"]) == (chosen["rank"], chosen["sets"], chosen["optimum"])
            if m > 1:
                close(found["redundancy"], chosen["redundancy"])


def _described(fp, layers, reading):
    plain, debiased = (standing(fp, layers, debiased=debiased, **reading) for debiased in (False, True))
    return vars(plain) | {"optimum": list(plain.optimum), "redundancy": [plain.redundancy, debiased.redundancy]}


BEAM = {"k_beam": 10, "after_midpoint": "singletons"}
CHOICES = [
    ("elsi", BEAM | {"k_expand": 10, "m": m}, variant, reading)
    for m, variant, reading in [
        *((m, variant, PLAIN) for m in (1, 2, 3) for variant in VARIANTS),
        *((2, VARIANTS[0], reading) for reading in READINGS[1:]),
        (4, VARIANTS[0], PLAIN),
    ]
] + [
    ("elsi", {"k_beam": 3, "k_expand": 2, "after_midpoint": "seeds", "m": 3}, VARIANTS[0], PLAIN),
    ("elsi", {"k_beam": None, "k_expand": None, "after_midpoint": "never", "m": 2}, VARIANTS[0], PLAIN),
    ("elsi", BEAM | {"k_expand": None, "after_midpoint": "never", "m": 1}, VARIANTS[0], PLAIN),
    *(
        ("elsi-c", BEAM | {"k_pool": k_pool, "debiased": debiased, "m": m}, variant, reading)
        for m, k_pool, debiased, variant, reading in [
            (1, 10, False, VARIANTS[0], PLAIN),
            (2, 10, False, VARIANTS[1], PLAIN),
            (3, 10, False, VARIANTS[0], PLAIN),
            (3, 10, True, VARIANTS[0], PLAIN),
            (3, 4, True, VARIANTS[2], READINGS[1]),
            (3, None, False, VARIANTS[3], READINGS[2]),
        ]
    ),
    *((method, {"m": m}, variant, reading) for method in ("exhaustive", "lowest") for m, variant, reading in [
        (1, VARIANTS[0], PLAIN), (2, VARIANTS[1], READINGS[3]), (3, VARIANTS[0], PLAIN)
    ]),
]  # fmt: skip
NAMES = {"k_beam": "kBeam", "k_expand": "kExpand", "k_pool": "kPool", "after_midpoint": "afterMidpoint"}


def _options(options, allowed):
    return {NAMES.get(name, name): value for name, value in options.items()} | {"allowed": list(allowed)}


def test_every_method_takes_the_same_set(ask, path):
    fp = Fingerprint.load(path)
    last_out = servable_layers("sglang", fp.num_layers)
    cases = [(*choice, None if at % 3 else last_out) for at, choice in enumerate(CHOICES)]
    cases += [(*choice, None) for choice in CHOICES[::3]]
    queries = [
        {
            "ask": "choose",
            "method": method,
            "options": _options(options, among or range(fp.num_layers)),
            "variant": variant,
            "reading": reading,
        }
        for method, options, variant, reading, among in cases
    ]
    for (method, options, variant, reading, among), found in zip(cases, ask(path, queries), strict=True):
        chosen = select(fp.variant(*variant), method, **options, **reading, among=among)
        assert found["layers"] == list(chosen.layers), (method, options, variant, reading, among)
        close(found["entropy"], chosen.entropy)


def test_stability_over_the_bootstrap(ask, path):
    fp = Fingerprint.load(path)
    cases = [
        ("elsi", {"k_beam": 4, "k_expand": 4, "after_midpoint": "singletons", "m": 3}, PLAIN),
        ("elsi", BEAM | {"k_expand": 10, "m": 2}, READINGS[3]),
        ("elsi-c", BEAM | {"k_pool": 10, "debiased": False, "m": 2}, PLAIN),
        ("elsi-c", BEAM | {"k_pool": 5, "debiased": True, "m": 2}, PLAIN),
        ("exhaustive", {"m": 1}, PLAIN),
        ("lowest", {"m": 1}, READINGS[1]),
    ]
    queries = [
        {"ask": "stability", "method": method, "options": _options(options, range(fp.num_layers)), "reading": reading}
        | {"variant": VARIANTS[0]}
        for method, options, reading in cases
    ]
    for (method, options, reading), found in zip(cases, ask(path, queries), strict=True):
        expected = stability(fp, method, **options, **reading)
        assert found["replicates"] == expected.replicates
        close([found["share"], found["jaccard"], *found["layerShare"]], [expected.share, expected.jaccard, *expected.layer_share])


def test_interval_of_the_share_and_servable_place(ask, path):
    fp = Fingerprint.load(path)
    among = servable_layers("sglang", fp.num_layers)
    expected = describe_choice(fp, "elsi", 2, among=among)
    share, replicates = expected["stability"]["share"], expected["stability"]["replicates"]
    interval, own = ask(path, [
        {"ask": "wilson", "k": round(share * replicates), "n": replicates},
        {"ask": "standings", "variant": VARIANTS[0], "reading": PLAIN, "sets": [expected["layers"]], "among": list(among)},
    ])  # fmt: skip
    close(interval, expected["stability"]["interval"])
    assert (own[0]["rank"], own[0]["sets"]) == (expected["servable"]["rank"], expected["servable"]["sets"])
    close(own[0]["regret"], expected["servable"]["regret"])


def test_interval_at_the_ends(ask):
    from scipy.stats import binomtest

    cases = [(k, n) for n in (1, 6, 40) for k in range(n + 1)]
    for (k, n), found in zip(cases, ask("", [{"ask": "wilson", "k": k, "n": n} for k, n in cases]), strict=True):
        interval = binomtest(k, n).proportion_ci(method="wilson")
        close(found, [interval.low, interval.high])


def test_rules(ask):
    cases = [(rule, n, m) for rule in RULES for n in (1, 2, 5, 6, 24, 30, 36) for m in (1, 3, 4)]
    answers = ask("", [{"ask": "rule", "method": rule, "n": n, "m": m} for rule, n, m in cases])
    for (rule, n, m), found in zip(cases, answers, strict=True):
        try:
            assert found == list(layer_rule(rule, n, None if rule.startswith("eagle") else m))
        except ElsiError as error:
            assert found["problem"] == str(error)


def test_ids_and_reasons_are_the_library_s(ask):
    cases = [((1, 12, 13), 30), ((0, 1, 29), 30), ((5,), 24), ((2, 3, 4, 35), 36)]
    for (layers, n), found in zip(cases, ask("", [{"ask": "ids", "layers": layers, "n": n} for layers, n in cases]), strict=True):
        expected = engine_ids(layers, n)
        assert {name: entry["named"] for name, entry in found.items()} == {
            name: value if isinstance(value, str) else list(value) for name, value in expected.items()
        }
        assert all(entry["servable"] == list(servable_layers(name, n)) for name, entry in found.items())
    described = describe_choice(synthetic(), "elsi", 2)
    found = ask("", [{"ask": "ids", "layers": described["layers"], "n": 8}])[0]
    assert {name: found[name].get("config") for name in ("sglang", "vllm")} == described["config"]
    assert set(found) == set(CONVENTIONS)


@pytest.mark.parametrize("kind", ["random", "rank one", "zero rows", "graded", "diagonal", "equal"])
def test_eigenvalues(ask, kind):
    generator = torch.Generator().manual_seed(3)
    queries, expected = [], []
    for n in (1, 2, 3, 8, 32, 64):
        X = torch.randn(n, 2 * n, generator=generator, dtype=torch.float64)
        X = {
            "random": X,
            "rank one": X[:, :1],
            "zero rows": X * (torch.arange(n) % 2)[:, None],
            "graded": X * 10.0 ** -torch.arange(n)[:, None],
            "diagonal": torch.diag(X[:, 0]),
            "equal": torch.eye(n, dtype=torch.float64),
        }[kind]
        K = X @ X.mT
        row, column = torch.tril_indices(n, n)
        queries.append({"ask": "eigenvalues", "packed": K[row, column].tolist(), "n": n})
        expected.append(torch.linalg.eigvalsh(K))
    for found, values in zip(ask("", queries), expected, strict=True):
        close(sorted(found), values, 1e-13 * float(values.abs().max() or 1))


def test_triples_of_36_layers_are_a_matter_of_seconds(ask, deep):
    seconds = ask(deep, [{"ask": "seconds", "variant": VARIANTS[0], "reading": PLAIN, "m": 3}])[0]
    print(f"7,140 sets in {seconds:.2f} s")
    assert seconds < 20  # 1 s on one slow core; a machine may be busy


def test_sha256(ask):
    texts = ["", "abc", *("a" * n for n in (55, 56, 63, 64, 65, 119, 120, 1000))]
    found = ask("", [{"ask": "sha256", "text": text} for text in texts])
    assert found == [hashlib.sha256(text.encode()).hexdigest() for text in texts]


def test_the_hash_is_the_library_s(ask, path):
    assert ask(path, [{"ask": "parse", "name": "x"}]) == [Fingerprint.load(path).sha256]


@pytest.fixture
def small(tmp_path):
    return synthetic().save(tmp_path / "small.safetensors")


def _edited(path, change):
    """The file with other tensors or another header, written by safetensors itself."""
    from elsi_lib.fingerprint import FORMAT, read_tensors

    tensors, header = read_tensors(path, FORMAT, "a fingerprint")
    tensors, header = change(dict(tensors), dict(header))
    save_file(tensors, path, metadata=header)


def _nan(tensors, header):
    tensors["grams"][0, 0, 0] = math.nan
    return tensors, header


DAMAGE = {
    "empty": (lambda path: path.write_bytes(b""), "it has 0 bytes"),
    "a picture": (lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(64)), "does not begin like a safetensors file"),
    "cut in the header": (lambda path: path.write_bytes(path.read_bytes()[:200]), "breaks off within its header"),
    "cut in the tensors": (lambda path: path.write_bytes(path.read_bytes()[:-1000]), "it is truncated: "),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + bytes(3)), "bytes that its header does not know"),
    "not JSON": (lambda path: path.write_bytes((4).to_bytes(8, "little") + b"{{{{"), "does not begin like a safetensors file"),
    "a checkpoint": (lambda path: save_file({"w": torch.zeros(2)}, path), "it is not a fingerprint (format none"),
    "another format": (
        lambda path: _edited(path, lambda tensors, header: (tensors, header | {"format": "elsi-fingerprint-9"})),
        'format "elsi-fingerprint-9", expected "elsi-fingerprint-1"',
    ),
    "no passport": (
        lambda path: _edited(path, lambda tensors, header: (tensors, {"format": header["format"]})),
        "no readable passport",
    ),
    "other shapes": (
        lambda path: _edited(path, lambda tensors, header: (tensors | {"grams": tensors["grams"][:3].clone()}, header)),
        "tensor grams is torch.float64 of 3 x 8 x 36, expected torch.float64 of 4 x any x 36",
    ),
    "half a bootstrap": (
        lambda path: _edited(path, lambda tensors, header: (tensors | {"bootstrap_step": torch.zeros(1, 8)}, header)),
        "tensor bootstrap_step is torch.float32 of 1 x 8, expected torch.float32 of 6 x 8",
    ),
    "another type": (
        lambda path: _edited(path, lambda tensors, header: (tensors | {"norms": tensors["norms"].bool()}, header)),
        "tensor norms has the unexpected type BOOL",
    ),
    "NaN": (lambda path: _edited(path, _nan), "tensor grams holds NaN or infinity"),
    "edited": (
        lambda path: _edited(path, lambda tensors, header: (tensors | {"grams": tensors["grams"] * 2}, header)),
        "edited after it was written: its content does not match its hash",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_bad_file_is_named_with_what_is_wrong_and_the_way_out(ask, small, damage):
    break_it, says = DAMAGE[damage]
    break_it(small)
    problem = ask(small, [{"ask": "parse", "name": "mine.safetensors"}])[0]["problem"]
    assert problem.startswith("mine.safetensors cannot be shown: ") and says in problem
    assert "`elsi calibrate TARGET -o FILE`" in problem
    with pytest.raises(ElsiError):
        Fingerprint.load(small).bootstrap  # noqa: B018 - reading it is what fails for "half a bootstrap"


def test_addresses_round_trip(ask):
    kept = [
        "",
        "#target=qwen2.5-coder-0.5b-instruct",
        "#layers=1,12,13&filtered=0&map=debiased",
        "#method=elsi-c&m=4&k_beam=all&k_pool=3&after_midpoint=seeds&debiased=1&among=sglang",
        "#method=lowest&alpha=inf&center=1&normalize=trace&sink=0",
    ]
    changed = {
        "#introduction": "",
        "#method=elsi&m=3&k_pool=5": "",
        "#layers=13,1,12": "#layers=1,12,13",
    }
    wrong = ["#method=best", "#m=three", "#colour=red", "#layers=1,,2", "#alpha=0", "#k_beam=0", "#filtered=perhaps", "#m=%E0%A4%A"]
    found = ask("", [{"ask": "address", "hash": hash} for hash in [*kept, *changed, *wrong]])
    assert [entry["hash"] for entry in found] == [*kept, *changed.values(), *[""] * len(wrong)]
    assert [bool(entry["problems"]) for entry in found] == [False] * (len(kept) + len(changed)) + [True] * len(wrong)


def test_a_site_without_fingerprints_has_a_list_all_the_same(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "workflow")
    from explorer_data import explorer_data

    files = explorer_data([tmp_path / "none"])
    assert list(files) == ["site.js"] and b'"fingerprints": []' in files["site.js"]
    synthetic().save(tmp_path / "one" / "a" / "fingerprint.safetensors")
    synthetic(layers=9).save(tmp_path / "two" / "a" / "fingerprint.safetensors")
    files = explorer_data([tmp_path / "one", tmp_path / "two"])
    assert set(files) == {"site.js", "a.js"} and b'"layers": 9' in files["site.js"]
