//! Spans that an operator sees. Alone in its process: what is enabled is decided once for all threads of one.

mod common;

use common::World;
use parking_lot::Mutex;
use std::io::Write;
use std::sync::Arc;
use tracing_subscriber::fmt::format::FmtSpan;

/// What a subscriber wrote.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().clone()).unwrap()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_swap_leaves_a_span_of_each_stage() {
    let World(_memory, weights, _resident, fresh) = World::new();
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_span_events(FmtSpan::CLOSE)
        .with_ansi(false)
        .with_max_level(tracing::Level::DEBUG)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, || {
        weights.swap(1, &fresh.input()).unwrap();
        weights.unload(9).unwrap_err();
    });
    let text = log.text();
    for stage in ["lora_audit", "lora_pack", "lora_begin", "lora_commit"] {
        let closed = |line: &str| {
            line.contains("lora_swap{") && line.contains(stage) && line.contains("close")
        };
        assert!(
            text.lines().any(closed),
            "{stage} is not in lora_swap:\n{text}"
        );
    }
    assert!(text.contains("reason=\"slot-out-of-range\""), "{text}");
}
