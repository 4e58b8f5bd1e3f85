use super::*;

fn mat(ptr: u64, rows: usize, cols: usize, stride: usize) -> Result<MatMut<'static>, KernelError> {
    MatMut::unbacked(ptr, rows, cols, stride)
}

#[test]
fn an_interleaved_row_splits_into_disjoint_outputs() {
    let qkv = mat(0x1000, 4, 96, 100).unwrap();
    let whole = qkv.strided();
    let [q, k, v] = qkv.split_cols([64, 16, 16]).unwrap();
    assert_eq!((q.ptr().0, q.cols(), q.row_stride()), (0x1000, 64, 100));
    assert_eq!((k.ptr().0, k.cols(), k.rows()), (0x1000 + 128, 16, 4));
    assert_eq!(v.ptr().0, 0x1000 + 160);
    for (a, b) in [(&q, &k), (&k, &v), (&q, &v)] {
        assert!(!a.as_ref().overlaps(b));
        assert!(a.strided().overlaps(&whole));
    }
}

#[test]
fn splitting_past_the_last_column_is_refused() {
    let error = mat(0x1000, 4, 96, 96)
        .unwrap()
        .split_cols([64, 64])
        .unwrap_err();
    assert!(matches!(
        error,
        KernelError::OutOfRange {
            quantity: "columns",
            value: 128,
            max: 96,
            ..
        }
    ));
    assert!(
        mat(0x1000, 4, 96, 96)
            .unwrap()
            .split_cols([1, usize::MAX])
            .is_err()
    );
}

#[test]
fn parts_address_their_first_element() {
    let part = mat(0x1000, 8, 32, 40).unwrap().row_range(3..5).unwrap();
    assert_eq!((part.ptr().0, part.rows()), (0x1000 + 3 * 80, 2));
    let part = part.col_range(8..32).unwrap();
    assert_eq!((part.ptr().0, part.cols()), (0x1000 + 3 * 80 + 16, 24));
}

#[test]
fn impossible_views_are_refused() {
    assert!(matches!(
        mat(0x1000, 2, 8, 7),
        Err(KernelError::StrideTooSmall { .. })
    ));
    assert!(matches!(
        mat(0x1001, 2, 8, 8),
        Err(KernelError::Misaligned { .. })
    ));
    assert!(matches!(mat(0, 2, 8, 8), Err(KernelError::Null { .. })));
    assert!(matches!(
        mat(0x1000, usize::MAX, 8, usize::MAX),
        Err(KernelError::ViewOutside { .. })
    ));
}

#[test]
fn a_view_of_no_rows_needs_no_memory() {
    let view = mat(0, 0, 8, 8).unwrap();
    assert_eq!((view.rows(), view.cols()), (0, 8));
}
