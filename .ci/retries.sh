# Tests of real clusters share the cores with each other and with other programs. A test that fails may
# run once more, by itself. All such tests are named at the end, and few are allowed.

most_retried=3

# Name the tests that have failed, of all environments, and fail if there are too many, or the same in two of them.
report_retried() {
    local names n_retried twice
    names=$(cat "$scratch"/retried-* 2> /dev/null || true)
    if [ -z "$names" ]; then return; fi
    n_retried=$(wc -l <<< "$names")
    echo "== RETRIED: $n_retried failed while others ran, at most $most_retried may"
    # shellcheck disable=SC2001
    sed 's/^/   /' <<< "$names"
    if [ "$n_retried" -gt "$most_retried" ]; then
        echo '== FAILED: too many tests were retried'
        return 1
    fi
    twice=$(sort <<< "$names" | uniq --repeated)
    if [ -n "$twice" ]; then
        echo "== FAILED: failed in two environments: $twice"
        return 1
    fi
}

# Run pytest for the environment $1 with the options $2 of the first run, and with the arguments that follow.
run_tests() {
    local environment=$1 options=$2 status=0
    shift 2
    local cache=$scratch/cache-$environment
    local failed=$cache/v/cache/lastfailed
    PYTEST_ADDOPTS="$options -o cache_dir=$cache" pytest "$@" || status=$?
    if [ "$status" != 1 ]; then return "$status"; fi  # 1: tests have failed; others are errors of another kind
    python -c 'import json, sys; print(*sorted(json.load(open(sys.argv[1]))), sep="\n")' "$failed" \
        > "$scratch/retried-$environment"
    report_retried || return 1
    echo '== they run again, by themselves'
    PYTEST_ADDOPTS="-o cache_dir=$cache" pytest --last-failed --last-failed-no-failures none "$@"
}
