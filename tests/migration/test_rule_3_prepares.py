"""A prepare goes only when everything it served is in scopes: on every path, and in every caller that its effect reaches."""

from __future__ import annotations

from rewriting import check, kept, migrated, rewritten


def test_nothing_happens_to_a_prepare_that_nobody_in_sight_relies_on() -> None:
    kept(
        "def ready(policy):\n    policy.prepare_for_training()\n",
        "nothing in sight uses what it prepares",
        changed=False,
    )


def test_a_prepare_before_a_loop_goes() -> None:
    outcomes = check(
        """
        def train(policy, batches):
            policy.prepare_for_training()
            for batch in batches:
                if batch:
                    continue
                policy.train(batch, None)
        """,
        """
        def train(policy, batches):
            share(policy, only_colocated=True)
            for batch in batches:
                if batch:
                    continue
                with scopes(policy).training_mode():
                    policy.train(batch, None)
        """,
    )
    assert rewritten(outcomes)


def test_one_bare_use_on_one_path_keeps_it() -> None:
    text = kept(
        """
        def train(policy, batches, pool):
            policy.prepare_for_training()
            for batch in batches:
                if batch:
                    policy.get_logprobs(batch)
                else:
                    pool.submit(policy.train, batch)
        """,
        "train in train() cannot go into a scope: the method is passed as a value",
    )
    # What runs between the prepare that stays and the call that relies on it stays bare too.
    assert "scopes(" not in text


def test_a_bare_use_behind_the_next_transition_does_not_matter() -> None:
    text = migrated(
        """
        def train(policy, batch, pool):
            policy.prepare_for_lp_inference()
            policy.get_logprobs(batch)
            policy.prepare_for_training()
            pool.submit(policy.train, batch)
        """
    ).after.decode()
    assert "policy.prepare_for_lp_inference()" not in text
    assert "policy.prepare_for_training()" in text
    assert "    scopes(policy).forget()\n" in text


def test_an_effect_that_leaves_a_function_is_followed_into_its_callers() -> None:
    before = """
        def validate(policy, batch):
            policy.prepare_for_training()
            loss = policy.train(batch, None, eval_mode=True)
            policy.prepare_for_training()
            return loss

        def train(policy, batches):
            for batch in batches:
                validate(policy, batch)
                {use}
        """
    outcomes = migrated(before.format(use="policy.train(batch, None)")).outcomes
    assert rewritten(outcomes)
    kept(before.format(use="pool.submit(policy.train, batch)"), "train in train() cannot go into a scope")


def test_an_effect_is_followed_into_functions_that_are_called() -> None:
    before = """
        def score(policy, batch):
            {use}

        def train(policy, batch):
            policy.prepare_for_lp_inference()
            return score(policy, batch)
        """
    assert rewritten(migrated(before.format(use="return policy.get_logprobs(batch)")).outcomes)
    kept(before.format(use="return map(policy.get_logprobs, batch)"), "get_logprobs in score() cannot go into a scope")


def test_the_names_of_parameters_are_those_of_the_callee() -> None:
    outcomes = check(
        """
        def step(actor_policy, data):
            actor_policy.train(data, None)

        def main(policy, data):
            policy.prepare_for_training()
            step(data=data, actor_policy=policy)
        """,
        """
        def step(actor_policy, data):
            share(actor_policy, only_colocated=True)
            with scopes(actor_policy).training_mode():
                actor_policy.train(data, None)

        def main(policy, data):
            step(data=data, actor_policy=policy)
        """,
    )
    assert rewritten(outcomes)


def test_a_generator_that_drives_a_loop_is_followed_both_ways() -> None:
    outcomes = check(
        """
        def with_reference(batches, policy):
            for batch in batches:
                batch["ref"] = policy.get_reference_policy_logprobs(batch)
                yield batch

        def train(policy, batches):
            policy.prepare_for_training()
            for batch in with_reference(batches, policy):
                policy.train(batch, None)
        """,
        """
        def with_reference(batches, policy):
            for batch in batches:
                with scopes(policy).logprob_mode(keep_train_buffers=True):
                    batch["ref"] = policy.get_reference_policy_logprobs(batch)
                yield batch

        def train(policy, batches):
            share(policy, only_colocated=True)
            for batch in with_reference(batches, policy):
                with scopes(policy).training_mode():
                    policy.train(batch, None)
        """,
    )
    assert rewritten(outcomes)


def test_a_function_that_is_not_in_sight_may_compute() -> None:
    text = kept(
        """
        from elsewhere import evaluate

        def f(policy, batch):
            policy.prepare_for_training()
            policy.train(batch, None)
            evaluate(policy, batch)
        """,
        "what it prepares is handed to evaluate(), which is not in sight",
    )
    # What it may have moved is not believed, nor what the prepare that stays has moved.
    assert text.count("scopes(policy).forget()") == 2


def test_a_function_that_only_looks_does_not_matter() -> None:
    code = """
        def f(policy, batch):
            policy.prepare_for_training()
            maybe_gpu_profile_step(policy, 1)
            print(policy, isinstance(policy, object))
            policy.train(batch, None)
        """
    assert rewritten(migrated(code).outcomes)


def test_methods_of_a_class_share_their_attributes() -> None:
    before = """
        class Trainer:
            def ready(self):
                self.policy.prepare_for_training()

            def step(self, batch):
                {use}
        """
    assert rewritten(migrated(before.format(use="return self.policy.train(batch, None)")).outcomes)
    kept(before.format(use="return submit(self.policy.train, batch)"), "train in Trainer.step() cannot go into a scope")


def test_functions_inside_a_function_see_its_handles() -> None:
    before = """
        def f(policy, batches, pool):
            policy.prepare_for_lp_inference()
            def work(batch):
                return policy.get_logprobs(batch)
            return {use}
        """
    assert rewritten(migrated(before.format(use="[work(batch) for batch in batches]")).outcomes)
    kept(before.format(use="pool.map(work, batches)"), "it stands in a callback")


def test_a_name_that_may_be_another_policy_counts_as_both() -> None:
    kept(
        """
        def f(policy, teacher_policy, batch, pool):
            policy.prepare_for_lp_inference()
            chosen_policy = policy
            if batch:
                chosen_policy = teacher_policy
            pool.submit(chosen_policy.get_logprobs, batch)
        """,
        "the method is passed as a value",
    )


def test_paths_through_finally_and_except_count() -> None:
    before = """
        def f(policy, batch):
            policy.prepare_for_lp_inference()
            try:
                return policy.get_logprobs(batch)
            {clause}:
                {use}
        """
    assert rewritten(migrated(before.format(clause="except OSError", use="policy.score(batch)")).outcomes)
    kept(before.format(clause="except OSError", use="later(policy.score)"), "score in f() cannot go into a scope")
    kept(before.format(clause="finally", use="later(policy.score)"), "score in f() cannot go into a scope")


def test_reading_the_weights_is_a_use() -> None:
    check(
        """
        def setup(policy, policy_generation):
            policy.prepare_for_training()
            info = policy.prepare_refit_info()
            policy_generation.prepare_refit_info(info)
        """,
        """
        def setup(policy, policy_generation):
            share(policy, only_colocated=True)
            with scopes(policy).refit_mode():
                info = policy.prepare_refit_info()
            policy_generation.prepare_refit_info(info)
        """,
    )


def test_what_is_taken_for_granted_is_said() -> None:
    result = migrated("def f(policy, b):\n    policy.prepare_for_training()\n    policy.train(b, None)\n")
    assert result.assumed == ("prepare_for_training in f: what calls f uses policy in scopes only",)


def test_a_prepare_that_the_next_one_makes_useless_goes() -> None:
    check(
        """
        def f(policy, b):
            policy.prepare_for_lp_inference()
            policy.prepare_for_training()
            policy.train(b, None)
        """,
        """
        def f(policy, b):
            share(policy, only_colocated=True)
            with scopes(policy).training_mode():
                policy.train(b, None)
        """,
    )
