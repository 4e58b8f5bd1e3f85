//! Counters of a pool's life, for an engine to export.

use crate::WeightsError;
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Counters at one moment. All of them only ever rise.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[non_exhaustive]
pub struct Metrics {
    /// Adapters that became visible in a slot: startup, promotion and swap together.
    pub loads: u64,
    /// Promotions among them.
    pub promotions: u64,
    /// Swaps among them.
    pub swaps: u64,
    /// Adapters whose slot new contents were begun in.
    pub evictions: u64,
    /// Unloads asked for and granted.
    pub unloads: u64,
    /// Changes of the active slot.
    pub rotations: u64,
    /// Bytes of the slot images that became visible.
    pub bytes: u64,
    /// Loads, promotions, swaps, unloads and rotations that were refused or failed.
    pub refusals: u64,
    /// Why: the reason of each error finding of a refused adapter, [`WeightsError::reason`] of everything else.
    pub refusal_reasons: BTreeMap<String, u64>,
    /// Audits, those that refused among them.
    pub audit: StageTimes,
    /// Packing of slot images, waiting for staging memory included.
    pub pack: StageTimes,
    /// Adapters that landed in staging memory instead of being audited and packed, failures among them.
    pub land: StageTimes,
    /// Uploads of slot images, from begun to seen landed.
    pub upload: StageTimes,
    /// Table writes and extensions, from landed to visible.
    pub commit: StageTimes,
}

/// How often a stage ran, and how long it took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[non_exhaustive]
pub struct StageTimes {
    /// Runs.
    pub count: u64,
    /// All runs together, microseconds.
    pub total_us: u64,
    /// The longest, microseconds.
    pub most_us: u64,
}

/// How contents came to a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrival {
    Startup,
    Promotion,
    Swap,
}

/// The counters themselves.
#[derive(Debug, Default)]
pub(super) struct Counters {
    loads: Counter,
    promotions: Counter,
    swaps: Counter,
    pub(super) evictions: Counter,
    pub(super) unloads: Counter,
    pub(super) rotations: Counter,
    bytes: Counter,
    refusals: Counter,
    reasons: Mutex<BTreeMap<String, u64>>,
    pub(super) audit: Stage,
    pub(super) pack: Stage,
    pub(super) land: Stage,
    pub(super) upload: Stage,
    pub(super) commit: Stage,
}

/// One counter.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, by: u64) {
        self.0.fetch_add(by, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Times of one stage.
#[derive(Debug, Default)]
pub(super) struct Stage {
    count: Counter,
    total_us: Counter,
    most_us: AtomicU64,
}

impl Stage {
    /// Runs `work` and counts its time.
    pub(super) fn time<T>(&self, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let done = work();
        self.took(start.elapsed());
        done
    }

    pub(super) fn took(&self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.count.add(1);
        self.total_us.add(us);
        self.most_us.fetch_max(us, Ordering::Relaxed);
    }

    fn times(&self) -> StageTimes {
        StageTimes {
            count: self.count.get(),
            total_us: self.total_us.get(),
            most_us: self.most_us.load(Ordering::Relaxed),
        }
    }
}

impl Counters {
    /// Contents became visible.
    pub(super) fn loaded(&self, arrival: Arrival, bytes: u64) {
        self.loads.add(1);
        self.bytes.add(bytes);
        match arrival {
            Arrival::Startup => {}
            Arrival::Promotion => self.promotions.add(1),
            Arrival::Swap => self.swaps.add(1),
        }
    }

    /// Counts a refusal or failure, once, where it arises, and hands it on.
    pub(super) fn refused(&self, error: WeightsError) -> WeightsError {
        self.refusals.add(1);
        let mut reasons = self.reasons.lock();
        let mut count = |reason: &str| match reasons.get_mut(reason) {
            Some(count) => *count += 1,
            None => {
                reasons.insert(reason.to_owned(), 1);
            }
        };
        match &error {
            WeightsError::Refused { report, .. } => {
                report.errors().for_each(|finding| count(&finding.reason));
            }
            other => count(other.reason()),
        }
        tracing::debug!(reason = error.reason(), %error, "refused");
        error
    }

    pub(super) fn snapshot(&self) -> Metrics {
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
            audit: self.audit.times(),
            pack: self.pack.times(),
            land: self.land.times(),
            upload: self.upload.times(),
            commit: self.commit.times(),
        }
    }
}
