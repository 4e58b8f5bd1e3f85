//! `lora plan` and `lora bench`: the numbers hold together.

use lora_tests::{case_dir, lora};

fn plan(case: &str, more: &[&str]) -> lora_tests::CommandOutput {
    let model = case_dir(case).join("config.json").display().to_string();
    let mut arguments = vec!["plan", "--json", "--model", &model];
    arguments.extend(more);
    lora(&arguments)
}

#[test]
fn parts_add_up_and_grow_with_slots() {
    let of = |slots: &str| plan("llama_plain", &["--max-loras", slots, "--max-rank", "8"]).json();
    let (one, four) = (of("1"), of("4"));
    let number = |json: &serde_json::Value, key: &str| json[key].as_u64().expect("a number");
    let parts = ["slots", "tables", "experts", "expert_tables", "scratch"];
    let parts = parts.map(|key| number(&four, key));
    assert_eq!(parts.iter().sum::<u64>(), number(&four, "total"));
    assert_eq!(number(&four, "slots"), 4 * number(&one, "slots"));
    assert_eq!(number(&four, "slot"), number(&one, "slot"));
}

#[test]
fn what_fits_is_what_a_plan_of_that_many_slots_takes() {
    let memory = "1MiB";
    let json = plan(
        "llama_plain",
        &[
            "--max-loras",
            "4",
            "--max-rank",
            "8",
            "--max-rows",
            "16",
            "--memory",
            memory,
        ],
    )
    .json();
    let fit = json["slots_that_fit"].as_u64().expect("a number");
    assert!(fit >= 1);
    let total = |slots: u64| {
        let json = plan(
            "llama_plain",
            &[
                "--max-loras",
                &slots.to_string(),
                "--max-rank",
                "8",
                "--max-rows",
                "16",
            ],
        )
        .json();
        json["total"].as_u64().expect("a number")
    };
    assert!(total(fit) <= 1 << 20);
    assert!(total(fit + 1) > 1 << 20);
}

#[test]
fn plan_that_does_not_fit_is_refused() {
    assert_eq!(
        plan(
            "llama_plain",
            &["--max-loras", "4", "--max-rank", "8", "--memory", "1KiB"]
        )
        .code,
        1
    );
}

#[test]
fn experts_take_room_only_where_they_are_on() {
    let arguments = ["--max-loras", "2", "--max-rank", "8"];
    let off = plan("qwen3_moe_params", &arguments).json();
    assert_eq!(
        (&off["experts"], &off["expert_tables"]),
        (&0.into(), &0.into())
    );
    let on = plan(
        "qwen3_moe_params",
        &[
            "--max-loras",
            "2",
            "--max-rank",
            "8",
            "--experts",
            "--expert-units",
            "10",
        ],
    )
    .json();
    assert_eq!(
        on["experts"].as_u64(),
        on["expert_unit"].as_u64().map(|unit| unit * 10)
    );
    // 24 bytes for each of two slots, two layers, three projections and three experts, each kind on a multiple of 16; 4 for each slot.
    assert_eq!(on["expert_tables"], 2 * 3 * (48 + 48 + 32 + 32) + 8);
}

#[test]
fn quick_bench_times_every_stage() {
    let output = lora(&["bench", "--quick", "--json"]);
    assert_eq!(output.code, 0, "{}", output.err);
    let json = output.json();
    let adapters = json["adapters"].as_array().expect("a list");
    assert!(adapters.iter().any(|t| t["what"] == "audit and pack"));
    let deltas = json["deltas"].as_array().expect("a list");
    let overlays = json["overlays"].as_array().expect("a list");
    let experts = json["experts"].as_array().expect("a list");
    assert!(!deltas.is_empty() && !experts.is_empty() && !overlays.is_empty());
    let timings = adapters.iter().chain(deltas).chain(experts);
    for timing in timings.chain(overlays) {
        let us = timing["microseconds"].as_f64();
        assert!(us.is_some_and(|us| us > 0.0), "{timing}");
    }
    let swap = &json["swap"];
    for part in [
        "copy_us",
        "visible_us",
        "visible_busy_us",
        "audit_us",
        "pack_us",
    ] {
        assert!(swap[part].as_f64() > Some(0.0), "{part}: {swap}");
    }
    assert_eq!(swap["others"][0]["phase"], "no swap");
    assert!(swap["others"][0]["step_us"]["count"].as_u64() >= Some(5));
    for delta in deltas.iter().chain(experts) {
        assert!(delta["moved_bytes"].as_u64() >= delta["floor_bytes"].as_u64());
    }
    for (timing, part) in [
        (&deltas[0]["sites"], "gate_up"),
        (&experts[0], "group_rows"),
    ] {
        assert!(timing[part].as_f64() > Some(0.0), "{timing}");
    }
    let parts = ["row diff", "gather"].map(|part| &overlays[0]["parts"][part]);
    assert!(parts.iter().all(|us| us.as_f64() > Some(0.0)), "{parts:?}");
}

#[test]
fn bench_of_a_swap_says_what_it_costs_others_and_takes_itself() {
    let output = lora(&["bench", "--quick", "--only", "swap"]);
    assert_eq!(output.code, 0, "{}", output.err);
    assert!(output.out.contains("staged to visible"), "{}", output.out);
    assert!(!output.out.contains("moved/floor"), "{}", output.out);
}

#[test]
fn bench_measures_only_what_is_asked_for() {
    let arguments = ["bench", "--quick", "--json", "--only", "experts"];
    let json = lora(&arguments).json();
    let lines = |part: &str| json[part].as_array().map(Vec::len);
    assert_eq!(["adapters", "deltas", "overlays"].map(lines), [Some(0); 3]);
    assert!(lines("experts") > Some(0));
}

#[test]
fn quick_bench_prints_tables_of_deltas_and_overlays() {
    let output = lora(&["bench", "--quick"]);
    assert_eq!(output.code, 0, "{}", output.err);
    assert!(output.out.contains("| moved/floor |"), "{}", output.out);
    assert!(output.out.contains("rank 4 of 24, 6 rows, 3 adapters"));
    assert!(output.out.contains("build, 7 rows differ, 500 x 64"));
}
