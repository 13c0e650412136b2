"""Manifests of several variants: consistency checks, and each entry's variant."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from calm_beam.manifest import (
    Calibration,
    Manifest,
    ManifestError,
    ParetoPlan,
    PathEntry,
    Plan,
    Variant,
    content_digest,
    manifest_text,
    parse_manifest,
)
from tests.calm_beam.manifest.builders import (
    VARIANTS,
    build_each_variant_manifest,
    build_path_entry,
    build_planned_manifest,
    build_positions,
    build_variants_manifest,
)

_MANIFEST = build_variants_manifest()
_ENTRY, _NEVER = _MANIFEST.calibrations
_STRANGE = Variant(tau=8.0, min_exit_layer=1)


def test_a_manifest_of_variants_is_read_again() -> None:
    """A written manifest of variants reads back unchanged."""
    assert parse_manifest(manifest_text(_MANIFEST)) == _MANIFEST


def test_without_variants_nothing_is_said_of_them() -> None:
    """Manifests without variants have the bytes and digests of earlier versions."""
    text = manifest_text(build_planned_manifest())
    assert not any(word in text for word in ("variant", "pareto", "choosing"))


def test_an_entry_is_decoded_by_its_own_variant() -> None:
    """An entry's variant overrides `decode`; an entry that never exits has none."""
    assert _MANIFEST.decode_of(_ENTRY) == dataclasses.replace(_MANIFEST.decode, tau=4.0, min_exit_layer=2)
    assert _MANIFEST.decode_of(_NEVER) == _MANIFEST.decode
    assert "chosen by a part of the calibration set" not in build_planned_manifest().guarantee


def test_who_chose_does_not_count_as_evidence() -> None:
    """The n of a promise is the number of units that tested it."""
    assert (_MANIFEST.data.units, _MANIFEST.data.units_of(None)) == (200, 140)


def test_variants_that_were_tested_by_themselves_are_read_again() -> None:
    """If each variant was tested by itself, all examples count, and each has an equal share of epsilon."""
    manifest = build_each_variant_manifest()
    text = manifest_text(manifest)
    assert parse_manifest(text) == manifest
    assert "choosing" not in text
    assert (manifest.data.units_of(None), manifest.calibrations[0].variant) == (200, VARIANTS[-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # p-values of .03 are small enough for .05, and not for half of it.
        (
            lambda path: (path[0], _changed(path[1], rejected=True), *path[2:]),
            "must reject exactly where p_value is at",
        ),
        (
            lambda path: (_changed(path[0], rejected=False), *path[2:]),
            "must reject exactly where p_value is at most 0.02",
        ),
        (lambda path: (path[0], *path[2:]), "must end at the first test that failed, or at the last threshold"),
        (lambda path: (*path[:2], path[2]), "must end at the first test that failed, or at the last threshold"),
        (lambda path: path[2:], "must test every one of plan.pareto.variants, one after the other"),
        (lambda path: (path[0], *path[2:], path[1]), "must test every one of plan.pareto.variants, one after the"),
        (
            lambda path: (*path[:2], path[2], _changed(path[3], threshold=0.7)),
            "must test thresholds in the planned order",
        ),
    ],
)
def test_each_variant_is_tested_down_the_grid(
    change: Callable[[tuple[PathEntry, ...]], tuple[PathEntry, ...]], message: str
) -> None:
    """Every variant is tested in the planned order, up to its first failure at its share of epsilon."""
    entry = build_each_variant_manifest().calibrations[0]
    with pytest.raises(ManifestError, match=message):
        build_each_variant_manifest(calibrations=(dataclasses.replace(entry, path=change(entry.path)),))


def test_who_chooses_and_how_is_tested_agree() -> None:
    """If no part of the data selects, the procedure is another one; inconsistent manifests are refused."""
    manifest = build_each_variant_manifest()
    assert manifest.plan is not None
    with pytest.raises(
        ManifestError, match=r"tests\[0\].procedure must be pareto exactly if pareto is there, got each_"
    ):
        dataclasses.replace(manifest.plan, pareto=_pareto(variants=(VARIANTS[0], VARIANTS[-1])))
    with pytest.raises(ManifestError, match=r"n must be data.examples less data.choosing"):
        build_each_variant_manifest(data=dataclasses.replace(manifest.data, choosing=60))


def _changed(step: PathEntry, **changes: Any) -> PathEntry:
    return dataclasses.replace(step, **changes)


def _with_entry(**changes: Any) -> Callable[[], Manifest]:
    return lambda: build_variants_manifest(calibrations=(dataclasses.replace(_ENTRY, **changes), _NEVER))


def _with_step(place: int, **changes: Any) -> Callable[[], Manifest]:
    path = list(_ENTRY.path)
    path[place] = dataclasses.replace(path[place], **changes)
    return _with_entry(path=tuple(path))


def _with_plan(**changes: Any) -> Callable[[], Manifest]:
    return lambda: build_variants_manifest(plan=_plan(**changes))


def _plan(**changes: Any) -> Plan:
    assert _MANIFEST.plan is not None
    return dataclasses.replace(_MANIFEST.plan, **changes)


def _pareto(**changes: Any) -> ParetoPlan:
    return ParetoPlan(**{"variants": VARIANTS, "choosing_share": 0.3, **changes})


_OTHER = "variant must be tau 4, from layer 2, as the last one rejected in path says"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            _with_entry(variant=VARIANTS[0]),
            "variant must be tau 4, from layer 2, as the last one rejected in path says, got tau 1",
        ),
        (
            _with_entry(variant=None),
            "variant must be tau 4, from layer 2, as the last one rejected in path says, got null",
        ),
        (
            _with_step(0, variant=None),
            r"path\[0\].variant must be there exactly if procedure is pareto or each_variant, got none",
        ),
        (
            _with_step(1, variant=VARIANTS[0], threshold=0.9),
            r"path\[1\] must be of a variant and threshold that were not",
        ),
        (
            _with_step(0, variant=_STRANGE),
            r"path\[0\].variant must be one of plan.pareto.variants, which are tau 1, from",
        ),
        (_with_step(0, threshold=0.95), r"path\[0\].threshold must be one of plan.thresholds, got 0.95"),
        (_with_step(0, rejected=False, p_value=0.5), r"path\[0\].rejected is false, so the test stops there"),
        (_with_step(0, n=200), r"path\[0\].n must be data.examples less data.choosing, which is 140"),
        (
            _with_entry(threshold_by_position=build_positions(0.9, tau=1.0)),
            r"threshold_by_position\[1\] must be .* which schedule decay makes of threshold 0.9",
        ),
        (_with_plan(pareto=None), r"tests\[0\].procedure must be pareto exactly if pareto is there"),
        (_with_plan(pareto=_pareto(variants=VARIANTS[:3])), "variant must be one of plan.pareto.variants"),
        (_with_plan(group_key="language"), "pareto must be left out where there is group_key"),
        (
            lambda: _pareto(variants=VARIANTS[:1]),
            "variants must be two or more different ones, got tau 1, from layer 1",
        ),
        (lambda: _pareto(variants=VARIANTS[:1] * 2), "variants must be two or more different ones"),
        (
            lambda: _pareto(variants=(VARIANTS[0], Variant(min_exit_layer=1))),
            "variants must all have a tau, or none of them",
        ),
        (lambda: _pareto(choosing_share=1), "choosing_share must be a number in"),
        (lambda: Variant(tau=-1, min_exit_layer=1), "tau must be a finite number"),
        (lambda: Variant(min_exit_layer=0), "min_exit_layer must be an integer of at least 1, got 0"),
        (lambda: Variant(min_exit_layer=1, confidence="oracle"), "confidence must be one of softmax, softmax_max,"),
        (lambda: Variant(min_exit_layer=1, exit_interval=0), "exit_interval must be an integer of at least 1, got 0"),
        (
            lambda: _pareto(variants=(VARIANTS[0], Variant(tau=1.0, min_exit_layer=1, confidence="state"))),
            "variants must all have a confidence, or none of them",
        ),
        (lambda: build_variants_manifest(plan=None), "plan.pareto is missing, though there are calibrations by"),
        (
            lambda: build_variants_manifest(data=dataclasses.replace(_MANIFEST.data, choosing=None)),
            r"n must be data.examples, which is 200",
        ),
        (
            lambda: dataclasses.replace(_MANIFEST.data, choosing=200),
            "choosing must leave others to test, of 200 examples, got 200",
        ),
        (
            lambda: build_variants_manifest(decode=dataclasses.replace(_MANIFEST.decode, tau=2.0)),
            "decode.tau and decode.min_exit_layer must be those of one of plan.pareto.variants, got 2.0 and 1",
        ),
        (
            lambda: build_variants_manifest(
                plan=_plan(pareto=_pareto(variants=(*VARIANTS, Variant(tau=1.0, min_exit_layer=7))))
            ),
            "plan.pareto.variants must exit from a layer of at most model.layers on, which is 6, got 7",
        ),
        (
            lambda: build_path_entry(variant="tau 1"),
            "variant must be a Variant",
        ),
        (
            lambda: build_planned_manifest(data=dataclasses.replace(_MANIFEST.data, choosing=60)),
            "n must be data.examples less data.choosing, which is 140",
        ),
    ],
)
def test_what_does_not_agree_is_refused(make: Callable[[], object], message: str) -> None:
    """Variants, plan, path and data must be of one run."""
    with pytest.raises(ManifestError, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": None}, "calibrations\\[0\\].variant must not be null"),
        ({"variant": {"tau": 4.0}}, "calibrations\\[0\\].variant.min_exit_layer is missing"),
        ({"variant": {"tau": "4", "min_exit_layer": 2}}, "calibrations\\[0\\].variant.tau must be a finite number"),
        ({"variant": {"tau": 4.0, "min_exit_layer": 2, "x": 1}}, "calibrations\\[0\\].variant.x is not a key"),
        ({"tau": 4.0}, "calibrations\\[0\\].tau is not a key"),
    ],
)
def test_malformed_variants_are_named(change: dict[str, Any], message: str) -> None:
    """A malformed variant is refused with the place of the wrong value."""
    content: dict[str, Any] = _MANIFEST.to_dict()
    content["calibrations"][0] |= change
    with pytest.raises(ManifestError, match=message):
        Manifest.from_dict({**content, "digest": content_digest(content)})


def test_another_order_is_another_plan() -> None:
    """Lists, their order and the share are in the plan's hash."""
    digests = {
        _plan().digest,
        _plan(pareto=_pareto(choosing_share=0.5)).digest,
        _plan(pareto=_pareto(variants=VARIANTS[::-1])).digest,
        _plan(salt="calm-beam/1").digest,
    }
    assert len(digests) == 4


def test_other_procedures_know_no_variants() -> None:
    """A procedure with an ordered grid has one variant."""
    plain: Calibration = build_planned_manifest().calibrations[0]
    message = r"path\[0\].variant must be there exactly if procedure is pareto or each_variant, got one"
    with pytest.raises(ManifestError, match=message):
        dataclasses.replace(plain, path=tuple(dataclasses.replace(step, variant=VARIANTS[0]) for step in plain.path))
