//! `lora audit` over every recorded adapter: exit codes, JSON, and nothing lost in silence.

use lora_tests::{CommandOutput, IndexEntry, case_dir, index, lora};
use serde_json::Value;

fn audit(name: &str, more: &[&str]) -> CommandOutput {
    let model = case_dir(name).join("config.json").display().to_string();
    let adapter = case_dir(name).join("adapter").display().to_string();
    let mut arguments = vec!["audit", "--json", "--model", &model, &adapter];
    arguments.extend(more);
    lora(&arguments)
}

/// The JSON has its promised shape, and says what the exit code says.
fn check_shape(case: &IndexEntry, output: &CommandOutput) {
    let json = output.json();
    let name = &case.name;
    let keys: Vec<&str> = json
        .as_object()
        .expect("an object")
        .keys()
        .map(String::as_str)
        .collect();
    let mut wanted = [
        "ok", "adapter", "applied", "ignored", "tensors", "findings", "modules", "bytes", "overlay",
    ];
    wanted.sort_unstable();
    let mut sorted = keys.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, wanted, "{name}");
    let ok = json["ok"].as_bool().expect("a boolean");
    assert_eq!(output.code, if ok { 0 } else { 1 }, "{name}");
    assert_eq!(ok, output.error_reasons().is_empty(), "{name}");
    for finding in json["findings"].as_array().expect("a list") {
        assert!(
            matches!(finding["level"].as_str(), Some("error" | "warning")),
            "{name}: {finding}"
        );
        assert!(
            finding["reason"].as_str().is_some_and(is_reason),
            "{name}: {finding}"
        );
        assert!(
            finding["tensor"].is_null() || finding["tensor"].is_string(),
            "{name}: {finding}"
        );
        assert!(
            finding["message"].as_str().is_some_and(|m| m.len() > 10),
            "{name}: {finding}"
        );
    }
    for module in json["modules"].as_array().expect("a list") {
        assert!(
            module["layer"].is_u64() && module["module"].is_string(),
            "{name}: {module}"
        );
        assert!(
            module["expert"].is_null() || module["expert"].is_u64(),
            "{name}: {module}"
        );
        assert!(
            module["rank"].as_u64().is_some_and(|r| r > 0) && module["scale"].is_f64(),
            "{name}: {module}"
        );
    }
    if ok {
        let ignored = json["ignored"].as_array().expect("a list").len() as u64;
        let applied = json["applied"].as_u64().expect("a number");
        assert_eq!(
            applied + ignored,
            json["tensors"].as_u64().expect("a number"),
            "{name}"
        );
        assert!(applied > 0, "{name}");
    }
}

/// Lower-case words with hyphens; a config field's name may hold underscores.
fn is_reason(reason: &str) -> bool {
    !reason.is_empty()
        && reason
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
}

#[test]
fn every_case_has_an_answer_with_and_without_everything_enabled() {
    for case in index() {
        check_shape(&case, &audit(&case.name, &[]));
        check_shape(&case, &audit(&case.name, &["--enable", "all", "--experts"]));
        let permissive = [
            "--enable",
            "all",
            "--experts",
            "--allow-partial",
            "--assume-peft-defaults",
            "--accept-bare-names",
            "--assume-base",
            "--stacked-layout",
            "a-in",
            "--stacked-order",
            "rank-major",
        ];
        check_shape(&case, &audit(&case.name, &permissive));
    }
}

#[test]
fn every_refuse_case_is_refused() {
    for case in index().into_iter().filter(|case| case.expect == "refuse") {
        let output = audit(&case.name, &["--enable", "all", "--experts"]);
        assert_eq!(output.code, 1, "{}", case.name);
        assert!(!output.error_reasons().is_empty(), "{}", case.name);
    }
}

#[test]
fn rank_and_scale_are_those_that_peft_recorded() {
    let cases = [
        "llama_plain",
        "llama_rslora",
        "llama_patterns",
        "llama_pattern_order",
        "variant_pissa_converted",
    ];
    for name in cases {
        let recorded =
            std::fs::read_to_string(case_dir(name).join("case.json")).expect("case.json is there");
        let recorded: Value = serde_json::from_str(&recorded).expect("case.json is JSON");
        let json = audit(name, &[]).json();
        let modules = json["modules"].as_array().expect("a list");
        let wanted = recorded["modules"].as_array().expect("a list");
        assert_eq!(modules.len(), wanted.len(), "{name}");
        for module in wanted {
            let path = module["module"].as_str().expect("a path");
            let found = modules.iter().find(|m| {
                path.ends_with(&format!(
                    "layers.{}.{}",
                    m["layer"],
                    m["module"].as_str().unwrap_or_default()
                ))
            });
            let found = found.unwrap_or_else(|| panic!("{name}: {path} is not in {modules:?}"));
            assert_eq!(found["rank"], module["r"], "{name}: {path}");
            let scale = module["scaling"].as_f64().expect("a number") as f32;
            assert_eq!(
                found["scale"].as_f64().expect("a number") as f32,
                scale,
                "{name}: {path}"
            );
        }
    }
}

#[test]
fn text_names_every_finding_and_the_verdict() {
    let adapter = case_dir("bad_nan").join("adapter").display().to_string();
    let model = case_dir("bad_nan")
        .join("config.json")
        .display()
        .to_string();
    let output = lora(&["audit", &adapter, "--model", &model]);
    assert_eq!(output.code, 1);
    assert!(
        output.out.contains("REJECT[non-finite-weights]"),
        "{}",
        output.out
    );
    assert!(output.out.contains("refused, 1 error"), "{}", output.out);
    let adapter = case_dir("llama_plain")
        .join("adapter")
        .display()
        .to_string();
    let output = lora(&["audit", &adapter, "--model", &model]);
    assert_eq!(output.code, 0);
    assert!(
        output.out.contains("applied 28 of 28 tensors"),
        "{}",
        output.out
    );
}

#[test]
fn max_rank_below_the_adapters_own_is_refused() {
    let output = audit("llama_plain", &["--max-rank", "1"]);
    assert_eq!(output.code, 1);
    assert!(
        output
            .error_reasons()
            .contains(&"rank-exceeds-pool".to_owned()),
        "{:?}",
        output.error_reasons()
    );
}

#[test]
fn unreadable_files_and_models_are_findings() {
    let model = case_dir("llama_plain")
        .join("config.json")
        .display()
        .to_string();
    let output = lora(&["audit", "--json", "/no/such/adapter", "--model", &model]);
    assert_eq!((output.code, output.error_reasons().is_empty()), (1, false));
    let adapter = case_dir("llama_plain")
        .join("adapter")
        .display()
        .to_string();
    let output = lora(&[
        "audit",
        "--json",
        &adapter,
        "--model",
        "/no/such/config.json",
    ]);
    assert_eq!(
        (output.code, output.error_reasons()),
        (1, vec!["model-config".to_owned()])
    );
    let output = audit("gpt2_conv1d", &[]);
    assert_eq!(
        (output.code, output.error_reasons()),
        (1, vec!["model-config".to_owned()])
    );
}

#[test]
fn usage_errors_exit_with_two() {
    let model = case_dir("llama_plain")
        .join("config.json")
        .display()
        .to_string();
    for arguments in [
        vec!["audit"],
        vec!["audit", "somewhere"],
        vec![
            "audit",
            "somewhere",
            "--model",
            &model,
            "--enable",
            "no_such_module",
        ],
        vec!["audit", "somewhere", "--model", &model, "--max-rank", "0"],
        vec!["audit", "somewhere", "--model", &model, "--max-rank", "513"],
        vec!["verify"],
        vec!["verify", "--max-rank", "513", "somewhere"],
        vec!["verify", "--backend", "tpu", "somewhere"],
        vec!["plan", "--model", &model, "--max-loras", "8"],
        vec![
            "plan",
            "--model",
            &model,
            "--max-loras",
            "8",
            "--max-rank",
            "513",
        ],
        vec!["no-such-command"],
    ] {
        let output = lora(&arguments);
        assert_eq!(output.code, 2, "{arguments:?}");
        assert!(
            output.out.is_empty() && !output.err.is_empty(),
            "{arguments:?}"
        );
    }
    assert_eq!(lora(&["--help"]).code, 0);
}

#[test]
#[cfg(unix)]
fn files_without_an_end_are_refused_unread() {
    let adapter = case_dir("llama_plain").join("adapter");
    let adapter = adapter.display().to_string();
    let output = lora(&["audit", &adapter, "--model", "/dev/zero"]);
    assert_eq!(output.code, 1);
    assert!(
        output.out.contains("/dev/zero: not a regular file"),
        "{}",
        output.out
    );
    let sizes = ["--max-loras", "1", "--max-rank", "8"];
    let output = lora(&[&["plan", "--model", "/dev/zero"], sizes.as_slice()].concat());
    assert_eq!(output.code, 1);
    assert_eq!(output.err, "lora: /dev/zero: not a regular file\n");
}
