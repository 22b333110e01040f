"""Every update of a run has the config of the session that took it."""

from __future__ import annotations

from maxbatch.run.folder.sessions import Changed, Session
from maxbatch.run.session_configs import SessionConfigs
from tests.helpers.tiny import one_layer_config

LAST = one_layer_config("learning_rate=1e-3", "steps=9", "dataset_path=new.jsonl")


def session(first: int | None, last: int | None, changed: Changed | None) -> Session:
    return Session(0.0, 1.0, 1, 1, first, last, {}, changed=changed)


def test_each_update_has_the_config_of_the_last_session_that_took_it() -> None:
    rate, length = {"learning_rate": ["0.01", "0.001"]}, {"steps": ["6", "9"]}
    sessions = [
        session(1, 6, {}),
        session(None, None, {}),  # it ended before its first update was known
        session(4, 5, rate),  # from a checkpoint of step 3
        session(6, 5, length),  # it took none
        session(6, 9, {}),
    ]
    configs = SessionConfigs(LAST, sessions)
    found = [(configs.at(step).learning_rate, configs.at(step).steps) for step in (3, 4, 5, 6, 9)]
    assert found == [(0.01, 6), (0.001, 6), (0.001, 6), (0.001, 9), (0.001, 9)]


def test_places_of_data_are_those_of_the_last_session_since_they_may_have_moved() -> None:
    changed: Changed = {
        "dataset_path": ["old.jsonl", "new.jsonl"],
        "load_parameters_path": ["old", ""],
        "learning_rate": ["0.01", "0.001"],
    }
    then = SessionConfigs(LAST, [session(1, 4, {}), session(5, 9, changed)]).at(1)
    assert then is not None
    assert (then.dataset_path, then.load_parameters_path) == ("new.jsonl", "")
    assert then.learning_rate == 0.01


def test_a_config_before_a_session_that_does_not_state_its_changes_is_unknown() -> None:
    configs = SessionConfigs(LAST, [session(1, 4, {}), session(5, 9, None)])
    assert configs.first_known == 5
    assert configs.at(4) is None and configs.at(5) == LAST
    assert SessionConfigs(LAST, [session(1, 9, None)]).at(1) == LAST, "nothing is before it"
    assert SessionConfigs(LAST, []).at(3) == LAST, "of a fork that has not trained yet"
