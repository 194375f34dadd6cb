"""The Dockerfile: its stages, copied files and pinned versions, and consistency with k8s/."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.container.context import read_context
from tests.container.dockerfile import Dockerfile, Instruction, expand, read_dockerfile

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
VARIANTS = ("cpu", "cu130")


def read(variant: str = "cpu", text: str = TEXT) -> Dockerfile:
    return read_dockerfile(text, {"VARIANT": variant})


def steps(dockerfile: Dockerfile, target: str, name: str) -> list[Instruction]:
    """Return, in order, the instructions with this name in the stages that build the target."""
    return [
        step
        for stage in dockerfile.stages_for(target)
        for step in dockerfile.stages[stage].instructions
        if step.name == name
    ]


def pods(tree: object) -> list[dict]:
    """Return all pod specifications in a manifest that use the image."""
    branches = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    found = [pod for branch in branches for pod in pods(branch)]
    if isinstance(tree, dict) and any(image.startswith("kway:") for image in images(tree)):
        found.append(tree)
    return found


def images(pod: dict) -> list[str]:
    return [each.get("image", "") for each in containers(pod)]


def containers(pod: dict) -> list[dict]:
    return [*(pod.get("initContainers") or ()), *(pod.get("containers") or ())]


def all_pods() -> list[dict]:
    texts = (path.read_text(encoding="utf-8") for path in sorted((ROOT / "k8s").rglob("*.yaml")))
    return [
        pod for text in texts for document in yaml.safe_load_all(text) for pod in pods(document)
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_has_a_stage_and_a_torch_index(variant):
    dockerfile = read(variant)
    assert dockerfile.stages["runtime"].base == variant
    assert dockerfile.arguments["TORCH_INDEX"].endswith(f"/{variant}")
    assert variant in dockerfile.stages_for("kway")


def test_the_default_target_runs_any_command_and_serve_adds_no_layer():
    dockerfile = read()
    assert list(dockerfile.stages)[-1] == "kway"
    assert dockerfile.stages["kway"].instructions == ()
    added = {step.name for step in dockerfile.stages["serve"].instructions}
    assert added == {"EXPOSE", "HEALTHCHECK", "CMD"}


def test_the_image_does_not_contain_the_build_stages():
    for stage in ("kway", "serve"):
        bases, name = set(), stage
        while name in read().stages:
            bases.add(name)
            name = read().stages[name].base
        assert not bases & {"packages", "built"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_base_image_has_a_fixed_tag(variant):
    dockerfile = read(variant)
    outside = {stage.base for stage in dockerfile.stages.values()} - set(dockerfile.stages)
    assert outside == {"debian:bookworm-slim"}


def test_the_base_image_and_the_constraints_agree_on_the_python_version():
    assert "on Python 3.11" in (ROOT / "constraints.txt").read_text().splitlines()[0]
    assert "bookworm" in read().arguments["DEBIAN"]  # Debian 12, where python3 is 3.11


def test_every_package_is_installed_under_the_constraints():
    runs = [step.text for step in steps(read(), "kway", "RUN")]
    installs = [part for text in runs for part in re.findall(r"pip --python .*", text)]
    assert len(installs) == 3
    for line in installs:
        kway_alone = "--no-deps" in line and line.endswith(" .")
        assert "--constraint constraints.txt" in line or kway_alone, line


def test_the_context_contains_every_copied_file():
    context = read_context(ROOT)
    copies = [step for step in steps(read(), "kway", "COPY") if "from" not in step.flags]
    assert copies
    for step in copies:
        for source in step.words[:-1]:
            assert context.files(source)


def test_the_context_contains_every_file_of_the_package():
    context = read_context(ROOT)
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tools = setup["tool"]["setuptools"]
    packages = [pattern.removesuffix("*") for pattern in tools["packages"]["find"]["include"]]
    shipped = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    for package, patterns in tools["package-data"].items():
        folder = ROOT / package.replace(".", "/")
        shipped += [path for pattern in patterns for path in folder.glob(pattern)]
    shipped += [ROOT / name for name in setup["project"]["license-files"]]
    assert len(shipped) > 200
    missing = [path for path in shipped if not context.has(path.relative_to(ROOT).as_posix())]
    assert missing == []


@pytest.mark.parametrize(
    "path",
    [
        *(".git/config", ".venv/bin/python", "tests/data/test_mnist.py", "docs/demo.png"),
        *("demo/queries/1.png", "runs/glyphs/log", "shards/a.tar", "build/container/x"),
        *("tokens", ".env", "kway.egg-info/PKG-INFO", "data/__pycache__/a.cpython-311.pyc"),
    ],
)
def test_the_context_excludes_files_that_the_image_does_not_need(path):
    assert not read_context(ROOT).has(path)


@pytest.mark.parametrize("target", ["kway", "serve"])
def test_the_user_id_matches_the_manifests(target):
    contexts = [pod["securityContext"] for pod in all_pods()]
    wanted = {f"{each['runAsUser']}:{each['runAsGroup']}" for each in contexts}
    assert [step.text for step in steps(read(), target, "USER")] == ["1000:1000"] == list(wanted)


def test_image_workdir_and_environment_match_the_manifests():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    found = [each for pod in all_pods() for each in containers(pod)]
    assert {each["image"] for each in found} == {f"kway:{version}"}
    runtime = read().stages["runtime"].instructions
    (folder,) = (step.text for step in runtime if step.name == "WORKDIR")
    assert {each["workingDir"] for each in found} == {folder}
    (settings,) = (step.settings for step in runtime if step.name == "ENV")
    for each in found:
        given = {setting["name"]: setting.get("value") for setting in each["env"]}
        assert {name: given[name] for name in ("HOME", "USER")}.items() <= settings.items()


def test_the_health_check_uses_the_path_and_port_of_the_server():
    serve = read().stages["serve"].instructions
    check = next(step for step in serve if step.name == "HEALTHCHECK").text
    (port,) = (step.text for step in serve if step.name == "EXPOSE")
    assert f"'127.0.0.1', {port}," in check
    assert "'/health'" in check
    routes = (ROOT / "serving/http/routes/server.py").read_text(encoding="utf-8")
    assert '.get("/health"' in routes
    command = next(step for step in serve if step.name == "CMD").command
    assert "--port" not in command, "the check uses the default port"


def test_continued_lines_are_joined_and_comments_removed():
    text = 'ARG A=1\nFROM debian:x AS one\nRUN first \\\n# why\n && second\nCMD ["a", "b c"]\n'
    run, command = read_dockerfile(text, {}).stages["one"].instructions
    assert (run.line, run.text) == (3, "first  && second")
    assert run.command == ["/bin/sh", "-c", "first  && second"]
    assert command.command == ["a", "b c"]


def test_build_arguments_replace_defaults():
    text = "ARG A=1\nARG B=x/${A}\nFROM ${B} AS one\nCOPY --from=zero /a /b\n"
    assert read_dockerfile(text, {}).stages["one"].base == "x/1"
    assert read_dockerfile(text, {"A": "2"}).stages["one"].base == "x/2"
    assert read_dockerfile(text, {"A": "2"}).stages["one"].copied_stages() == ["zero"]
    assert expand("$A-${B:-none}-${C}", {"A": "1"}) == "1-none-"


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("FROM debian:x AS one\nADD a b\n", {}, "line 2: ADD is not supported"),
        ("FROM debian:x AS one\n", {"VARIENT": "cpu"}, "--build-arg VARIENT"),
    ],
)
def test_unsupported_instructions_and_arguments_are_rejected(text, arguments, message):
    with pytest.raises(ValueError, match=message):
        read_dockerfile(text, arguments)


def test_the_last_matching_rule_of_dockerignore_applies(tmp_path):
    rules = "*\n!kept\n**/secret\n!kept/deep/secret\n"
    (tmp_path / ".dockerignore").write_text(rules)
    context = read_context(tmp_path)
    (tmp_path / "other/hidden").mkdir(parents=True)
    (tmp_path / "kept/deep").mkdir(parents=True)
    for path in ("other/hidden/a", "kept/a", "kept/deep/secret"):
        (tmp_path / path).touch()
    assert context.files(".") == [Path("kept/a"), Path("kept/deep/secret")]
    paths = ["other", "kept/a", "kept/deep/a", "kept/secret", "kept/x/y/secret", "kept/deep/secret"]
    assert [context.has(path) for path in paths] == [False, True, True, False, False, True]
    with pytest.raises(FileNotFoundError, match="COPY other"):
        context.files("other")
