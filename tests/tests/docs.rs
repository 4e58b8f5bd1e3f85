//! The docs list what the code has.

use lora_runtime::weights::{AuditReason, RejectReason};

fn adapters_md() -> String {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/adapters.md");
    // A bundle for another machine carries test data alone.
    std::fs::read_to_string(path).unwrap_or_default()
}

#[test]
fn every_reason_of_a_finding_is_in_the_docs_with_its_way_out() {
    let docs = adapters_md();
    if docs.is_empty() {
        eprintln!("skipped: docs/adapters.md is not on this machine");
        return;
    }
    let table: Vec<&str> = docs
        .lines()
        .filter(|line| line.starts_with("| `"))
        .collect();
    let reasons = AuditReason::ALL.iter().map(|reason| reason.as_str());
    for reason in reasons.chain(RejectReason::ALL.iter().map(|reason| reason.as_str())) {
        let row = table.iter().find(|line| {
            line.split('|')
                .nth(1)
                .is_some_and(|cell| cell.contains(&format!("`{reason}`")))
        });
        assert!(row.is_some(), "{reason} is not in docs/adapters.md");
    }
}
