//! Counters of a runtime's life, for an engine to export.

use lora_weights::{AuditReport, FindingLevel};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters at one moment. All of them only ever rise.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Metrics {
    /// Adapters that became visible in a slot: startup, promotion and swap together.
    pub loads: u64,
    /// Promotions among them.
    pub promotions: u64,
    /// Swaps among them.
    pub swaps: u64,
    /// Adapters that a promotion or a swap displaced.
    pub evictions: u64,
    /// Unloads asked for and granted.
    pub unloads: u64,
    /// Changes of the active slot.
    pub rotations: u64,
    /// Bytes uploaded into slots.
    pub bytes: u64,
    /// Loads, promotions and swaps that were refused or failed.
    pub refusals: u64,
    /// Error findings of refused adapters, by reason.
    pub refusal_reasons: BTreeMap<String, u64>,
}

/// The counters themselves.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) loads: Counter,
    pub(crate) promotions: Counter,
    pub(crate) swaps: Counter,
    pub(crate) evictions: Counter,
    pub(crate) unloads: Counter,
    pub(crate) rotations: Counter,
    pub(crate) bytes: Counter,
    refusals: Counter,
    reasons: Mutex<BTreeMap<String, u64>>,
}

/// One counter.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, by: u64) {
        self.0.fetch_add(by, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Counters {
    /// Counts a refused adapter, with the reasons of its report where there is one.
    pub(crate) fn refuse(&self, report: Option<&AuditReport>) {
        self.refusals.add(1);
        let findings = report.into_iter().flat_map(|report| &report.findings);
        let mut reasons = self.reasons.lock();
        for finding in findings.filter(|finding| finding.level == FindingLevel::Error) {
            *reasons.entry(finding.reason.clone()).or_default() += 1;
        }
    }

    pub(crate) fn snapshot(&self) -> Metrics {
        Metrics {
            loads: self.loads.get(),
            promotions: self.promotions.get(),
            swaps: self.swaps.get(),
            evictions: self.evictions.get(),
            unloads: self.unloads.get(),
            rotations: self.rotations.get(),
            bytes: self.bytes.get(),
            refusals: self.refusals.get(),
            refusal_reasons: self.reasons.lock().clone(),
        }
    }
}
