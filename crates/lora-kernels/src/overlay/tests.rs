use super::*;
use crate::host::HostBackend;
use crate::testing::TestBackend;
use crate::testing::overlay as bodies;
use crate::{
    Applied, DeviceBuffer, KernelError, LaunchOptions, LoraBackend, LoraKernels, OverlaySlot,
    RowGroups, RowGroupsSpec, Skip, Stream,
};
use half::bf16;
use lora_weights::device::DevicePtr;
use std::sync::Arc;

const ROWS: usize = 3;
const HIDDEN: usize = 8;
const VOCAB: usize = 10;

/// A backend and one slot's overlay of two ids.
struct Setup {
    backend: Arc<HostBackend>,
    kernels: LoraKernels,
    record: OverlaySlot,
    entries: DeviceBuffer,
    held: Vec<DeviceBuffer>,
}

impl Setup {
    fn new(options: LaunchOptions) -> Self {
        let backend = Arc::new(HostBackend::new());
        let rows = DeviceBuffer::from_slice(backend.clone(), &[bf16::ONE; 2 * HIDDEN]).unwrap();
        let ids = DeviceBuffer::from_slice(backend.clone(), &[1_u32, 4]).unwrap();
        let map = [-1, 0, -1, -1, 1, -1, -1, -1, -1, -1];
        let map = DeviceBuffer::from_slice(backend.clone(), &map).unwrap();
        let record = OverlaySlot {
            rows: rows.ptr().0,
            ids: ids.ptr().0,
            slot_map: map.ptr().0,
            n_override: 2,
            reserved: 0,
        };
        Self {
            kernels: LoraKernels::new(backend.clone(), options),
            entries: DeviceBuffer::from_slice(backend.clone(), &[record]).unwrap(),
            held: vec![rows, ids, map],
            record,
            backend,
        }
    }

    fn table(&self) -> OverlayTable {
        OverlayTable {
            entries: self.entries.ptr(),
            slots: 1,
            vocab: VOCAB as u32,
            hidden: HIDDEN as u32,
            expected_ids: 2,
        }
    }

    fn zeros(&self, elements: usize) -> DeviceBuffer {
        DeviceBuffer::zeroed(self.backend.clone(), (elements * 4) as u64).unwrap()
    }

    fn list(&self, values: [i32; ROWS]) -> DeviceBuffer {
        DeviceBuffer::from_slice(self.backend.clone(), &values).unwrap()
    }

    /// Replaces rows of tokens 1, 4 and 5 of slot 0; a refused launch must have left them.
    fn replace(&self, table: &OverlayTable, width: usize) -> Result<Applied, KernelError> {
        let (ids, slots) = (self.list([1, 4, 5]), self.list([0; ROWS]));
        let mut out = self.zeros(ROWS * width);
        let tokens = OverlayTokens {
            ids: ids.token_ids(ROWS)?,
            slots: SlotOfRow::Each(slots.row_slots(ROWS)?),
        };
        let rows = out.mat_mut(ROWS, width, width)?;
        let applied = replace_rows((&self.kernels, Stream::OWN), table, tokens, rows, None);
        let values: Vec<bf16> = out.download(0, ROWS * width)?;
        let written = values.contains(&bf16::ONE);
        assert_eq!(written, matches!(applied, Ok(Applied::Launched { .. })));
        applied
    }

    /// Logits of rows of slot 0.
    fn head(
        &self,
        table: &OverlayTable,
        (hidden, width): (usize, usize),
    ) -> Result<Applied, KernelError> {
        let x = self.zeros(ROWS * hidden);
        let mut logits =
            DeviceBuffer::from_slice(self.backend.clone(), &vec![7_f32; ROWS * width])?;
        let spec = RowGroupsSpec::new(8, 1, 48);
        let mut groups = RowGroups::new(self.backend.clone(), spec)?;
        groups.build_host(&[0; ROWS])?;
        let view = LogitsMut::F32(logits.f32_mat_mut(ROWS, width, width)?);
        let on = (&self.kernels, Stream::OWN);
        let x = x.mat(ROWS, hidden, hidden)?;
        let applied = head_logits(on, table, x, HeadRows::Grouped(&groups), view);
        let values: Vec<f32> = logits.download(0, ROWS * width)?;
        let written = values.contains(&0.0);
        assert_eq!(written, matches!(applied, Ok(Applied::Launched { .. })));
        applied
    }

    /// Changes the record of slot 0.
    fn with_record(mut self, change: impl FnOnce(&mut OverlaySlot)) -> Self {
        change(&mut self.record);
        self.entries.upload(0, &[self.record]).unwrap();
        self
    }
}

fn setup() -> Setup {
    Setup::new(LaunchOptions::default())
}

/// One test for each body that every backend is held to.
macro_rules! bodies {
    ($($body:ident),* $(,)?) => {
        $(#[test]
        fn $body() {
            let backend: TestBackend = Arc::new(HostBackend::new());
            bodies::$body(&backend);
        })*
    };
}

bodies! {
    row_distances_are_exact,
    gathered_rows_are_copies,
    replaced_rows_are_copies,
    logits_match_the_reference,
    logits_do_not_depend_on_the_batch,
    one_slot_for_all_rows_equals_rows_of_it,
    ids_past_the_vocabulary_are_skipped,
    wrong_overlays_are_caught,
}

#[test]
fn launches_in_order_launch_once() {
    let setup = setup();
    let launched = Ok(Applied::Launched { launches: 1 });
    assert_eq!(setup.replace(&setup.table(), HIDDEN), launched);
    assert_eq!(setup.head(&setup.table(), (HIDDEN, VOCAB)), launched);
}

#[test]
fn tables_outside_the_limits_are_refused() {
    let setup = setup();
    let fits = setup.table();
    let refused = |table: OverlayTable| {
        let replaced = setup.replace(&table, HIDDEN).unwrap_err();
        assert_eq!(setup.head(&table, (HIDDEN, VOCAB)).unwrap_err(), replaced);
        replaced
    };
    for table in [
        OverlayTable { slots: 0, ..fits },
        OverlayTable { vocab: 0, ..fits },
        OverlayTable { hidden: 0, ..fits },
        OverlayTable {
            vocab: (1 << 20) + 1,
            ..fits
        },
    ] {
        assert!(matches!(refused(table), KernelError::OutOfRange { .. }));
    }
    let entries = DevicePtr::NULL;
    let error = refused(OverlayTable { entries, ..fits });
    assert!(matches!(error, KernelError::Null { .. }));
    let entries = DevicePtr(fits.entries.0 + 8);
    let error = refused(OverlayTable { entries, ..fits });
    assert!(matches!(error, KernelError::Misaligned { align: 16, .. }));
}

#[test]
fn sizes_that_do_not_agree_are_refused() {
    let setup = setup();
    let error = setup.replace(&setup.table(), HIDDEN + 1).unwrap_err();
    assert!(matches!(
        error,
        KernelError::SizeMismatch {
            found: 9,
            expected: 8,
            ..
        }
    ));
    let error = setup.head(&setup.table(), (HIDDEN + 1, VOCAB)).unwrap_err();
    assert!(matches!(
        error,
        KernelError::SizeMismatch {
            found: 9,
            expected: 8,
            ..
        }
    ));
    let error = setup.head(&setup.table(), (HIDDEN, VOCAB - 1)).unwrap_err();
    assert!(matches!(
        error,
        KernelError::OutOfRange {
            value: 9,
            min: 10,
            ..
        }
    ));
    let two = OverlayTable {
        slots: 2,
        ..setup.table()
    };
    let error = setup.head(&two, (HIDDEN, VOCAB)).unwrap_err();
    assert!(matches!(
        error,
        KernelError::SizeMismatch {
            found: 2,
            expected: 1,
            ..
        }
    ));
}

#[test]
fn no_apply_launches_nothing() {
    let setup = Setup::new(LaunchOptions {
        no_apply: true,
        ..LaunchOptions::default()
    });
    let skipped = Ok(Applied::Skipped(Skip::NoApply));
    assert_eq!(setup.replace(&setup.table(), HIDDEN), skipped);
    assert_eq!(setup.head(&setup.table(), (HIDDEN, VOCAB)), skipped);
}

#[test]
fn records_that_lead_outside_memory_are_refused_by_the_host() {
    let outside = |change: fn(&mut OverlaySlot)| {
        let setup = setup().with_record(change);
        let table = setup.table();
        (
            setup.replace(&table, HIDDEN),
            setup.head(&table, (HIDDEN, VOCAB)),
        )
    };
    let (replaced, head) = outside(|record| record.n_override = 200);
    assert!(matches!(
        replaced,
        Err(KernelError::OutsideAllocation { .. })
    ));
    assert!(matches!(head, Err(KernelError::OutsideAllocation { .. })));
    let (replaced, head) = outside(|record| record.rows += 2);
    assert!(matches!(replaced, Err(KernelError::Misaligned { .. })));
    assert!(matches!(head, Err(KernelError::Misaligned { .. })));
    let (replaced, _) = outside(|record| record.slot_map = 64);
    assert!(matches!(
        replaced,
        Err(KernelError::OutsideAllocation { .. })
    ));
    let (_, head) = outside(|record| record.ids = 64);
    assert!(matches!(head, Err(KernelError::OutsideAllocation { .. })));
}

#[test]
fn ids_out_of_order_are_refused_by_the_host() {
    let mut setup = setup();
    setup.held[1].upload(0, &[4_u32, 4]).unwrap();
    let error = setup.head(&setup.table(), (HIDDEN, VOCAB)).unwrap_err();
    assert!(matches!(
        error,
        KernelError::BadIndex {
            index: 0,
            value: 4,
            ..
        }
    ));
}

#[test]
fn tables_that_would_be_written_are_refused() {
    let setup = setup();
    let mut buffer = setup.zeros(64);
    let on: (&dyn LoraBackend, _) = (&*setup.backend, Stream::OWN);
    let raw = buffer.ptr();
    let table = buffer.mat_mut(4, 8, 8).unwrap();
    let overlapping = || {
        let offset = DevicePtr(raw.0 + 16);
        crate::MatMut::unbacked(offset.0, 3, 8, 8).unwrap()
    };
    let sources = GatherSources {
        base: table.as_ref(),
        delta: table.as_ref(),
    };
    let index = setup.list([0; ROWS]);
    let index = index.row_indices(ROWS).unwrap();
    let error = gather_rows(on, sources, index, overlapping()).unwrap_err();
    assert!(matches!(error, KernelError::Overlap { .. }));
}

#[test]
fn empty_operations_enqueue_nothing() {
    let setup = setup();
    let on: (&dyn LoraBackend, _) = (&*setup.backend, Stream::OWN);
    let (a, mut b, list) = (setup.zeros(8), setup.zeros(8), setup.list([0; ROWS]));
    let none = a.mat(0, 8, 8).unwrap();
    row_diff(on, none, none, b.f32_mat_mut(1, 0, 0).unwrap()).unwrap();
    let sources = GatherSources {
        base: none,
        delta: none,
    };
    let out = b.mat_mut(0, 8, 8).unwrap();
    gather_rows(on, sources, list.row_indices(0).unwrap(), out).unwrap();
    let tokens = OverlayTokens {
        ids: list.token_ids(0).unwrap(),
        slots: SlotOfRow::All(0),
    };
    let on = (&setup.kernels, Stream::OWN);
    let out = b.mat_mut(0, HIDDEN, HIDDEN).unwrap();
    let applied = replace_rows(on, &setup.table(), tokens, out, None);
    assert_eq!(applied, Ok(Applied::Empty));
    let logits = LogitsMut::Bf16(b.mat_mut(0, VOCAB, VOCAB).unwrap());
    let head = HeadRows::All(0);
    let x = a.mat(0, HIDDEN, HIDDEN).unwrap();
    let applied = head_logits(on, &setup.table(), x, head, logits);
    assert_eq!(applied, Ok(Applied::Empty));
}
