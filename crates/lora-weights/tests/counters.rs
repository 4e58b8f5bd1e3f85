//! What an operator counts.

mod common;

use common::{World, moe_model};
use lora_weights::{Metrics, WeightsError};

#[test]
fn refusals_are_counted_once_each_by_reason() {
    let World(memory, weights, resident, fresh) = World::new();
    let lease = weights.lease(1).unwrap();
    weights.swap(1, &fresh.input()).unwrap_err();
    drop(lease);
    weights.promote(&resident[0].input()).unwrap_err();
    weights.rotate(3).unwrap_err();
    weights.swap(7, &fresh.input()).unwrap_err();
    memory.fail_upload(2, true);
    weights.swap(1, &fresh.input()).unwrap_err();
    weights.unload(1).unwrap_err();
    let model = moe_model();
    let wide = common::Adapter::new("wide", &common::Geometry::dense(&model, 64), 5.0);
    let refused = weights.promote(&wide.input()).unwrap_err();
    let WeightsError::Refused { report, .. } = &refused else {
        panic!("{refused}");
    };
    let findings = report.errors().count() as u64;

    let metrics: Metrics = weights.metrics();
    assert_eq!(metrics.refusals, 7);
    let count = |reason: &str| metrics.refusal_reasons.get(reason).copied().unwrap_or(0);
    for reason in [
        "slot-busy",
        "duplicate-name",
        "slot-out-of-range",
        "upload-failed",
    ] {
        assert_eq!(count(reason), 1, "{reason}: {metrics:?}");
    }
    // The rotation onto a placeholder, and the unload of what the failed upload left.
    assert_eq!(count("slot-empty"), 2, "{metrics:?}");
    let audited: u64 = metrics.refusal_reasons.values().sum::<u64>() - 6;
    assert_eq!(audited, findings, "{metrics:?}");
    assert_eq!((metrics.loads, metrics.swaps, metrics.evictions), (3, 0, 1));
}

#[test]
fn every_stage_of_what_became_visible_is_timed() {
    let World(_memory, weights, resident, fresh) = World::new();
    weights.promote(&fresh.input()).unwrap();
    weights.unload(3).unwrap();
    let metrics = weights.metrics();
    assert_eq!(
        (metrics.loads, metrics.promotions, metrics.unloads),
        (4, 1, 1)
    );
    for stage in [metrics.audit, metrics.pack, metrics.upload, metrics.commit] {
        assert_eq!(stage.count, 4, "{metrics:?}");
        assert!(stage.most_us <= stage.total_us);
    }
    assert!(metrics.bytes >= 4 * weights.layout().bytes().slot);
    let report = weights.audit(&resident[0].input());
    assert!(report.ok());
    assert_eq!(weights.metrics().audit.count, 5);
}
