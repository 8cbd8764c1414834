package survive

import (
	"context"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var said []string
		say := func(format string, args ...any) { said = append(said, fmt.Sprintf(format, args...)); panic("say") }
		runs := 0
		begin := time.Now()
		<-Go(context.Background(), "part", say, func() {
			if runs++; runs < 3 {
				_ = said[runs+len(said)]
			}
		})
		if runs != 3 || time.Since(begin) != 2*pause || len(said) != 2 || !strings.HasPrefix(said[0], "part: panic: runtime error: index out of range") {
			t.Errorf("%d runs in %s, said %q", runs, time.Since(begin), said)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := Go(ctx, "part", say, func() { panic("again") })
		synctest.Wait()
		cancel()
		<-done
	})
}

// TestEveryGoroutineIsGuarded reads the packages that PID 1 is made of: a
// goroutine there begins in Go or Run of this package.
func TestEveryGoroutineIsGuarded(t *testing.T) {
	// These run in processes of their own, or at build time.
	apart := []string{"network", "archive", "cmd", "survive"}
	found := 0
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if slices.Contains(apart, filepath.Base(path)) {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, path, nil, 0)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				t.Errorf("%s: go: use survive.Go", set.Position(n.Pos()))
			case *ast.CallExpr:
				sel, ok := n.Fun.(*ast.SelectorExpr)
				if !ok || sel.Sel.Name != "Go" && sel.Sel.Name != "AfterFunc" {
					return true
				}
				if pkg, ok := sel.X.(*ast.Ident); ok && pkg.Name == "survive" {
					found++
					return true
				}
				if !guarded(n) {
					t.Errorf("%s: %s: its function has to begin with survive.Run or survive.Once", set.Position(n.Pos()), sel.Sel.Name)
				}
				found++
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if found < 8 {
		t.Errorf("%d goroutines were found: the test looks in the wrong place", found)
	}
}

// guarded reports whether a call's function does one thing, and that guarded.
func guarded(call *ast.CallExpr) bool {
	f, ok := call.Args[len(call.Args)-1].(*ast.FuncLit)
	if !ok || len(f.Body.List) != 1 {
		return false
	}
	var text ast.Expr
	switch s := f.Body.List[0].(type) {
	case *ast.ExprStmt:
		text = s.X
	case *ast.AssignStmt:
		text = s.Rhs[0]
	}
	inner, ok := text.(*ast.CallExpr)
	if !ok {
		return false
	}
	sel, ok := inner.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	pkg, ok := sel.X.(*ast.Ident)
	return ok && pkg.Name == "survive" || sel.Sel.Name == "guard"
}
