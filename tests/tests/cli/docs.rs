//! The docs list what the code has.

use lora_runtime::weights::{AuditReason, RejectReason};
use lora_tests::{case_dir, index, lora};
use std::collections::BTreeSet;

/// The first cells of the reason tables; `None` where the docs are not on this machine (a bundle carries test data alone).
fn documented() -> Option<String> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/adapters.md");
    let docs = std::fs::read_to_string(path).ok()?;
    let cells = docs
        .lines()
        .filter(|line| line.starts_with("| `"))
        .filter_map(|line| line.split('|').nth(1));
    Some(cells.collect())
}

/// Every reason that the audit of any recorded adapter gives.
fn found_in_cases() -> BTreeSet<String> {
    let mut reasons = BTreeSet::new();
    for case in index() {
        let folder = |file: &str| case_dir(&case.name).join(file).display().to_string();
        let output = lora(&[
            "audit",
            "--json",
            "--model",
            &folder("config.json"),
            &folder("adapter"),
        ]);
        let json = output.json();
        let findings = json["findings"].as_array().expect("a list").iter();
        reasons
            .extend(findings.filter_map(|finding| finding["reason"].as_str().map(str::to_owned)));
    }
    reasons
}

#[test]
fn every_reason_of_a_finding_is_in_the_docs() {
    let Some(documented) = documented() else {
        eprintln!("skipped: docs/adapters.md is not on this machine");
        return;
    };
    let mut reasons = found_in_cases();
    reasons.extend(
        AuditReason::ALL
            .iter()
            .map(|reason| reason.as_str().to_owned()),
    );
    reasons.extend(
        RejectReason::ALL
            .iter()
            .map(|reason| reason.as_str().to_owned()),
    );
    assert!(reasons.len() > 50);
    // Fields of a config are documented as a kind; those that mean something of their own by name.
    let undocumented = |reason: &&String| {
        !reason.starts_with("config-") && !documented.contains(&format!("`{reason}`"))
    };
    let missing: Vec<&String> = reasons.iter().filter(undocumented).collect();
    assert!(missing.is_empty(), "not in docs/adapters.md: {missing:?}");
}
