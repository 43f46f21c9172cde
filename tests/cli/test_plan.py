"""`jshadow plan` as a user calls it: a lone config.json, tables, --json, typed errors."""

import dataclasses
import json

import pytest
from real_shapes import LLAMA_31_8B_JSON

from jshadow.cli.main import main
from jshadow.planner.gpu_specs import DEFAULT_GPUS
from jshadow.policies import ShadowKV

# As Meta publishes it, the keys that matter here.


@pytest.fixture
def config(tmp_path):
    """A config.json with nothing beside it."""
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA_31_8B_JSON))
    return str(tmp_path / "llama.json")


def answer(capsys, *arguments):
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["plans"]


def test_a_config_alone_is_planned_on_the_default_gpus(config, capsys):
    plans = answer(capsys, config, "--context", "122880", "--fetch", "device_put")
    assert [plan["gpu"]["name"] for plan in plans] == list(DEFAULT_GPUS)
    assert [plan["full"]["largest_batch"] for plan in plans] == [4, 4, 8]
    for plan in plans:
        assert plan["capacity"] == 122880 + 64
        assert plan["chosen"]["policy"]["name"] == "shadowkv"
        assert plan["chosen"]["policy"]["rank"] == 160
        assert plan["chosen"]["largest_batch"] >= 6 * plan["full"]["largest_batch"]
        step = plan["chosen"]["step"]
        assert {"weights", "left", "right", "landmarks", "outliers", "window"} <= step["hbm_bytes"].keys()
        assert step["pcie_bytes"] > 0
        packed, small = plan["beside"]["packed"], plan["beside"]["packed_small"]
        assert [side["policy"]["keys.profile"] for side in (packed, small)] == [[144, 224, 0], [16, 224, 192]]
        assert {
            (side["policy"]["choice.outlier_rule"], side["policy"]["keys.weights"]) for side in (packed, small)
        } == {("both", "queries")}
        # per key column: means have 4 / 8 bits more; scales and spreads of 16 bits come on top
        pair = [
            sum(side["row_parts"][part][0] for part in side["row_parts"] if part in ("left", "landmarks"))
            for side in (packed, plan["chosen"])
        ]
        assert pair[1] < pair[0] < 1.02 * pair[1]
        assert packed["row_host_bytes"] == small["row_host_bytes"]
        assert packed["row_host_bytes"] * 64 == plan["chosen"]["row_host_bytes"] * 17
        assert small["largest_batch"] > 1.9 * plan["chosen"]["largest_batch"]
        ratio = step["tokens_per_second"] / plan["full"]["step"]["tokens_per_second"]
        assert plan["ratio"] == pytest.approx(ratio)


def test_packed_codes_stand_beside_the_paper_s(config, capsys):
    """At equal bytes whatever the rank, in tables and at several lengths; beside no other policy or code."""
    options = ("--context", "8192", "--gpu", "h200", "--set", "rank=96", "--host-gib", "4", "--fetch", "device_put")
    [plan] = answer(capsys, config, *options)
    packed = plan["beside"]["packed"]
    assert packed["row_parts"]["left"][0] * 192 == plan["chosen"]["row_parts"]["left"][0] * 128
    assert plan["host_limit"] == 4 * 2**30 >= plan["chosen"]["host_bytes"]
    assert packed["batch"] * packed["row_host_bytes"] == packed["host_bytes"] <= 4 * 2**30
    assert main(["plan", config, "--context", "8192", "--gpu", "h200"]) == 0
    out = capsys.readouterr().out
    assert out.count("packed_small") == 3  # in two tables, and in a sentence on its fetch mode
    for row in answer(capsys, config, "--lengths", "4096,8192"):
        assert row["beside"]["packed_small"]["device_bytes"] < row["beside"]["packed"]["device_bytes"]
        assert row["beside"]["packed"]["host_bytes"] * 64 == row["host_bytes"] * 17
    assert main(["plan", config, "--lengths", "4096"]) == 0
    assert "full / packed_small" in capsys.readouterr().out
    for other in (["--policy", "quest"], ["--set", "keys=exact"], ["--set", "chunk_size=5"]):
        assert [row["beside"] for row in answer(capsys, config, "--lengths", "4096", *other)] == [{}]


def test_what_no_kernel_can_fetch_is_not_planned(config, capsys, monkeypatch):
    """Beside the chosen policy, which would be refused."""
    layout = ShadowKV.host_layout
    for told, there in {"": {"packed", "packed_small"}, "keys='transform'": set()}.items():

        def changed(policy, spec, told=told):
            return dataclasses.replace(layout(policy, spec), no_kernel=told if policy.keys.name == "transform" else "")

        monkeypatch.setattr(ShadowKV, "host_layout", changed)
        [plan] = answer(capsys, config, "--context", "8192", "--gpu", "h200", "--fetch", "zero_copy")
        assert plan["beside"].keys() == there


def test_bytes_of_packed_codes(config, capsys):
    """`jshadow policies`: a token's key code and landmarks, and a quarter of the host's bytes and of what moves."""
    assert main(["policies", "--model", config, "--context", "131072", "--json"]) == 0
    rows = {
        row["setting"]: row
        for row in json.loads(capsys.readouterr().out)["policies"]
        if "budget=2048" in row["setting"]
    }
    paper, tokens = rows.pop("shadowkv:rank=160:budget=2048"), 32 * 8 * 16380
    found = [row for setting, row in rows.items() if "transform" in setting]
    for row, code, landmarks, spread in zip(found, (256, 176), (328, 66), (10, 2), strict=True):
        parts = [row["parts"][part][0] for part in ("left", "landmarks", "spread")]
        assert parts == [code * tokens, landmarks * tokens, spread * tokens]
        assert (row["bytes_host"] * 64, row["bytes_moved"] * 64) == (
            paper["bytes_host"] * 17,
            paper["bytes_moved"] * 17,
        )


def test_long_settings_are_told_whole(config, capsys):
    long = "shadowkv:keys=transform:landmarks.dtype=int4:values.dtype=int4:keys.bits=1.333:chunk_size=8:budget=2048"
    assert main(["policies", "--model", config, "--context", "8192", "--policies", long]) == 0
    rows = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert "".join(rows) == long


def test_a_directory_means_the_same(config, capsys, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_31_8B_JSON))
    options = ("--context", "4096", "--gpu", "h200", "--count", "2", "--batch", "3", "--fetch", "resident")
    [plan] = answer(capsys, config, *options)
    assert [plan] == answer(capsys, str(tmp_path / "model"), *options)
    assert (plan["count"], plan["chosen"]["batch"], plan["fetch"]) == (2, 3, "resident")
    assert plan["chosen"]["host_bytes"] == plan["chosen"]["step"]["pcie_bytes"] == 0


def test_auto_is_the_fastest_mode(config, capsys):
    """It is the default, each policy has its own, and the table and JSON say why."""
    options = ("--context", "122880", "--gpu", "h200", "--host-gib", "128", "--batch", "37")
    [plan] = answer(capsys, config, *options)
    assert [plan] == answer(capsys, config, *options, "--fetch", "auto")
    assert (plan["fetch"], plan["gather_bytes_per_second"]) == ("auto", 20e9)
    sides = [plan["chosen"], plan["beside"]["packed"], plan["beside"]["packed_small"], plan["full"]]
    assert [side["fetch"] for side in sides[1:]] == ["zero_copy", "resident", "resident"]
    assert [side["repeat_share"] for side in sides[1:]] == [0.6, 0.6, 0]
    assert sides[2]["fetch_reason"].startswith("resident: 37 requests fit into 137.5 of 139.8 GiB of device memory")
    assert "no mode fits" in sides[0]["fetch_reason"]
    assert all(side["fetch_reason"] for side in sides)
    assert main(["plan", config, *options]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"h200, shadowkv packed_small, {sides[2]['fetch_reason']}." in out
    assert "│ fetch │ device_put │ zero_copy │ resident │ resident │" in out
    assert "│ kept from the last step │ 0% │ 60% │ 60% │ 0% │" in out


def test_a_gather_slower_than_the_link_is_told(config, capsys):
    options = ("plan", config, "--context", "8192", "--gpu", "h200", "--fetch", "device_put")
    told = "device_put cannot reach PCIe on h200: the host gathers {} GB/s (--gather), and PCIe moves 63 GB/s."
    assert main([*options]) == 0
    assert told.format("20") in " ".join(capsys.readouterr().out.split())
    assert main([*options, "--gather", "62.5"]) == 0
    assert told.format("62.5") in " ".join(capsys.readouterr().out.split())
    assert main([*options, "--gather", "63"]) == 0
    assert "cannot reach" not in capsys.readouterr().out
    [plan] = answer(capsys, *options[1:], "--gather", "10")
    step = plan["chosen"]["step"]
    assert step["gather_seconds"] == step["pcie_bytes"] / 10e9


def test_tables_say_what_they_stand_on(config, capsys):
    assert main(["plan", config, "--context", "122880", "--gpu", "a100-80gb", "--fetch", "device_put"]) == 0
    out = capsys.readouterr().out
    for told in (
        "largest batch",
        "prefilled in one call",
        "HBM, landmarks, GB",
        "HBM, scores, GB",
        "HBM, cache, GB",
        "PCIe, GB",
        "host gather, ms",
        "tokens/s, predicted",
        "tokens/s, at most",
        "2,039 GB/s HBM, 31.5 GB/s PCIe",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB",
    ):
        assert told in out.replace("\n", " ").replace("  ", " ")
    assert "nan" not in out


def test_a_batch_that_does_not_fit_is_shown_as_such(config, capsys):
    assert main(["plan", config, "--context", "122880", "--gpu", "h100", "--policy", "full", "--batch", "5"]) == 0
    assert "5 (no fit)" in capsys.readouterr().out
    assert main(["plan", config, "--context", "8", "--gpu", "h100", "--set", "rank=8"]) == 0
    assert "nothing to select" in capsys.readouterr().out


def test_a_room_changes_the_window_alone(config, capsys):
    """The window of a prompt of any length has space for the new tokens, both by length and on a GPU."""
    new = ("--max-new-tokens", "2048", "--fetch", "device_put")
    [usual] = answer(capsys, config, "--lengths", "8192", *new)
    [less] = answer(capsys, config, "--lengths", "8192", "--room", "1024", *new)
    token = 2 * 32 * 1024 * 2
    assert (
        usual["parts"]["window"][0] - less["parts"]["window"][0] == (1024 - 7) * token
    )  # a chunk that a prompt leaves unfinished
    assert {**usual["parts"], "window": 0} == {**less["parts"], "window": 0}
    [plan] = answer(capsys, config, "--context", "8192", "--gpu", "h200", "--room", "1024", *new)
    assert plan["chosen"]["row_parts"] == {name: list(size) for name, size in less["parts"].items()}


def test_sessions_over_shared_documents(config, capsys):
    """As a table and as JSON: a prompt half of its own for each session, or one for each document."""
    options = [config, "--context", "122880", "--room", "1024", "--gpu", "h200", "--host-gib", "128"]
    assert main(["plan", *options, "--shared", "30", "--fetch", "device_put", "--json"]) == 0
    [made] = json.loads(capsys.readouterr().out)["sessions"]
    assert made["gpu"] == "h200"
    assert list(made["plans"]) == ["shadowkv", "shadowkv packed", "shadowkv packed_small", "full"]
    shared = made["plans"]["shadowkv packed_small"]
    assert shared["fits"]
    assert shared["host_bytes"] <= shared["limits"]["host"] == 128 * 2**30
    [one] = shared["classes"]
    assert one["sessions_any_spread"] >= 300
    assert one["group_rows"] == 8
    assert one["documents_bytes"][1] == 30 * sum(host for _, host in one["prompt_parts"].values())
    parts = (shared["weights_bytes"], one["state_bytes"][0], shared["temporaries_bytes"], shared["prefill_bytes"][0])
    assert shared["device_bytes"] == sum(parts) + shared["limits"]["reserve"]
    assert main(["plan", *options, "--group-rows", "2", "--policy", "full"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for told in ("h200, 122,880 + 1,024 tokens", "sessions", "groups of 2 rows", "of 128.00", "Not counted"):
        assert told in out
    assert "documents" not in out


def test_bytes_by_length_from_a_config_alone(config, capsys):
    [plan] = answer(capsys, config, "--lengths", "1024")
    assert plan["full_bytes"] == (1024 + 64) * 2 * 2 * 1024 * 32


def test_help_names_the_variable(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--help"])
    assert ended.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for told in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "75 %", "--repeat-share", "a100-80gb, h100, h200"):
        assert told in out


GPU = ["--context", "4096", "--gpu", "h100"]
BAD = {
    "gpu": (["--context", "4096", "--gpu", "tpu"], "ConfigError: gpu must be one of"),
    "count": ([*GPU, "--count", "3"], "ConfigError: tp must divide the 8 KV heads, got tp=3"),
    "no_gpu": ([*GPU, "--count", "0"], "ConfigError: --count must be at least 1"),
    "batch": ([*GPU, "--batch", "-1"], "ConfigError: batch must be at least 1"),
    "context": (["--context", "131072"], "CapacityError: context + max_new_tokens"),
    "no_context": (["--gpu", "h100"], "ConfigError: --gpu must come with --context"),
    "no_context_repeats": (["--repeat-share", "0"], "ConfigError: --repeat-share must come with --context"),
    "both": ([*GPU, "--lengths", "5"], "ConfigError: --lengths must be left out"),
    "lengths": (["--lengths", "4,x"], "ConfigError: --lengths must be a comma list"),
    "host_gib": ([*GPU, "--host-gib", "0"], "ConfigError: --host-gib must be above 0"),
    "gather": ([*GPU, "--gather", "-1"], "ConfigError: --gather must be above 0"),
    "no_context_gather": (["--gather", "9"], "ConfigError: --gather must come with --context"),
    "no_kernel": ([*GPU, "--set", "keys=exact", "--fetch", "zero_copy"], "fetch must be 'device_put' or 'resident'"),
    "no_context_host": (["--host-gib", "9"], "ConfigError: --host-gib must come with --context"),
    "repeats": ([*GPU, "--repeat-share", "0.6", "--fetch", "device_put"], "ConfigError: repeat_share must be 0"),
    "policy": ([*GPU, "--policy", "magic"], "ConfigError: policy must be one of"),
    "setting": ([*GPU, "--set", "rank=9999"], "ConfigError: shadowkv.rank"),
    "dtype": ([*GPU, "--dtype", "int3"], "ConfigError: dtype must be one of"),
    "fetch": ([*GPU, "--fetch", "mail"], "ConfigError: fetch must be"),
    "room": ([*GPU, "--room", "-1"], "CapacityError: room must be an integer of at least 0, or None, got -1"),
    "shared": ([*GPU, "--shared", "0"], "ConfigError: --shared must be at least 1, got 0"),
    "shared_fetch": ([*GPU, "--shared", "2", "--fetch", "mail"], "ConfigError: fetch must be"),
    "shared_batch": ([*GPU, "--shared", "2", "--batch", "3"], "ConfigError: --batch must be left out with --shared"),
    "group_rows": ([*GPU, "--group-rows", "0"], "ConfigError: group_rows must be at least 1, got 0"),
    "no_context_shared": (["--shared", "2"], "ConfigError: --shared must come with --context"),
    "no_session": ([*GPU, "--shared", "2", "--room", "130000"], "CapacityError: prompt must be at least 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_told_on_stderr_alone(config, case, capsys):
    options, told = BAD[case]
    assert main(["plan", config, *options, "--json"]) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none.json", None),
        ("none/config.json", None),
        ("list.json", "[]"),
        ("torn.json", '{"model_type"'),
        ("other.json", '{"model_type": "magic"}'),
        ("odd.json", json.dumps(LLAMA_31_8B_JSON | {"hidden_size": "wide"})),
    ],
)
def test_a_bad_config_is_told(name, text, capsys, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["plan", str(tmp_path / name), *GPU]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("jshadow: C")
    assert "Error" in captured.err
    assert captured.out == ""
