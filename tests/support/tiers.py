"""Which cases `make test` runs, and which only `make test-all` runs.

`make test` must prove the library within minutes, and most of a case's time is compiling. So every policy meets the
laws that share the compiled prefill and step of other laws, a few policies meet all laws, and the tests in FEW_CASES
run on some of their cases. All other cases have the marker `whole`. Tests that are not named here always run.
"""

# These meet every law in `make test`: exact attention, a retrieval of tokens, the paper's method.
QUICK_POLICIES = ("full", "quest", "shadowkv")
# Every registered policy meets these in `make test`; variants of policies do not.
QUICK_LAWS = (
    "test_a_consumed_state_says_so",
    "test_a_fork_leaves_its_parent_usable",
    "test_an_abstract_state_is_the_real_one",
    "test_bytes_are_the_leaves_bytes",
    "test_fetch_modes_agree",
    "test_inactive_rows_do_not_change",
    "test_lossless_is_full",
    "test_nominal_is_at_or_under_its_share",
    "test_restricted_is_not_full",
    "test_there_and_back",
    "test_what_is_put_around_is_checked",
)
# Only `make test-all` runs these.
WHOLE_TESTS = (
    "test_a_dry_run_checks_everything_once",
    "test_a_dry_run_decodes_with_the_shares_that_were_set",
    "test_a_dry_run_takes_a_layer_apart",
    "test_a_row_alone_and_every_piece_through_the_model",
    "test_a_smaller_share_agrees_less",
    "test_a_state_that_is_full_can_rest",
    "test_all_parts_of_a_dry_run_report",
    "test_decode_and_prefill_of_a_checkpoint",
    "test_every_policy_is_at_or_under_its_share",
    "test_every_task_runs",
    "test_every_turn_is_asked_and_answers_stay_in_the_cache",
    "test_fewer_rows_only_while_there_is_time",
    "test_fewer_rows_where_memory_runs_out",
    "test_jit_is_no_jit",
    "test_prefills_of_few_states_and_forgotten_programs_change_nothing",
    "test_sweeps_run_beside_shares",
    "test_the_commands",
    "test_the_same_numbers_are_the_same_bytes",
    "test_two_hundred_requests_keep_live_bytes_flat",
)
# Of these, `make test` runs the cases whose ids stand here.
FEW_CASES = {
    "test_against_the_oracle": ("h2o", "infllm", "kivi", "loki", "omnikv", "quest", "snapkv", "specache"),
}


# Of these, `make test` runs one case of so many: the first, and each that comes so many places later.
ONE_OF = {
    "test_any_order_of_calls_is_dense_attention": 3,
    "test_every_family_equals_transformers": 4,
    "test_every_family_generates": 5,
    "test_keys_and_values": 3,
    "test_a_row_alone_is_the_row_in_a_batch": 5,
    "test_a_turn_is_as_many_steps": 5,
    "test_live_bytes_grow_by_the_compressed_state_alone": 2,
    "test_loglikelihoods_are_those_of_single_steps": 2,
    "test_pieces_of_a_prompt_give_the_same_model": 5,
    "test_random_rows": 4,
    "test_scores": 3,
    "test_shadowkv": 4,
    "test_table_4_of_the_paper": 8,
    "test_the_oracle_agrees": 3,
    "test_they_keep_every_law": 2,
    "test_tiny_llama_equals_transformers": 5,
    "test_transformers_reads_what_save_writes": 4,
    "test_what_covers_everything_is_exact": 3,
}


def is_whole(function: str, case: str, policy: str, index: int, registered: bool) -> bool:
    """Whether only `make test-all` runs a case.

    Args:
        function: name of the test function.
        case: the id of its parameters, or "".
        policy: the name in POLICY_CASES that it runs on, or "".
        index: its place among the cases of its function, from 0.
        registered: whether the case of POLICY_CASES is that of a registered policy, not of a variant.
    """
    if function in WHOLE_TESTS:
        return True
    if function in FEW_CASES:
        return case not in FEW_CASES[function]
    if index % ONE_OF.get(function, 1):
        return True
    return bool(policy) and policy not in QUICK_POLICIES and not (registered and function in QUICK_LAWS)
